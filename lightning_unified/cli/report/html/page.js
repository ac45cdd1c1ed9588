"use strict";
// Show the values at the step under the pointer, or of the arrow keys, in each chart.
(() => {
  const units = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const duration = value => {
    if (value < 1) return value < 1e-3 ? `${Number((value * 1e6).toPrecision(3))} µs` : `${Number((value * 1e3).toPrecision(3))} ms`;
    if (value < 119.5) return `${Number(value.toPrecision(3))} s`;
    const seconds = Math.round(value), minutes = Math.floor(seconds / 60);
    return minutes < 120 ? `${minutes} min ${seconds % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  };
  const shown = (value, unit) => {
    if (value === null) return "not finite";
    if (unit === "bytes") {
      const found = units.find(([size]) => Math.abs(value) >= size);
      return found ? `${(value / found[0]).toFixed(2)} ${found[1]}` : `${value} B`;
    }
    if (unit === "seconds") return duration(value);
    const text = Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(5)));
    return unit === "rows" ? `${text} rows` : text;
  };
  const nearest = (steps, x) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= x) low = middle; else high = middle;
    }
    return x - steps[low] <= steps[high] - x ? low : high;
  };
  const line = (color, label, value) => {
    const row = document.createElement("p"), dot = document.createElement("i"), text = document.createElement("span"), figure = document.createElement("b");
    dot.style.setProperty("--c", `var(--${color})`);
    text.textContent = label;
    figure.textContent = value;
    row.append(dot, text, figure);
    return row;
  };
  for (const plot of document.querySelectorAll(".plot")) {
    const source = plot.querySelector("script[type='application/json']");
    if (!source) continue;
    const data = JSON.parse(source.textContent), field = plot.querySelector(".field");
    const cursor = plot.querySelector(".cursor"), tip = plot.querySelector(".tip"), svg = plot.querySelector("svg");
    const [first, last] = data.range;
    const steps = [...new Set(data.series.flatMap(each => each.x).concat(data.marks.map(mark => mark.x)))].sort((a, b) => a - b);
    let current = -1;
    const show = index => {
      current = index;
      const step = steps[index], box = svg.getBoundingClientRect(), from = field.getBoundingClientRect();
      const x = box.left - from.left + (step - first) / (last - first) * box.width;
      tip.replaceChildren(Object.assign(document.createElement("p"), { textContent: `step ${step.toLocaleString("en")}` }));
      for (const each of data.series) {
        const at = nearest(each.x, step);
        const away = each.x[at] === step ? "" : ` (step ${each.x[at].toLocaleString("en")})`;
        tip.append(line(each.color, each.label + away, shown(each.y[at], data.unit)));
      }
      for (const mark of data.marks.filter(each => each.x === step).slice(0, 4)) tip.append(line(mark.color, mark.text, ""));
      cursor.style.display = tip.style.display = "block";
      cursor.style.left = `${x}px`;
      const width = tip.offsetWidth;
      tip.style.left = `${Math.max(0, x + 12 + width > from.width ? Math.min(x - width - 12, from.width - width) : x + 12)}px`;
    };
    const hide = () => { cursor.style.display = tip.style.display = "none"; };
    field.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect();
      show(nearest(steps, first + (event.clientX - box.left) / box.width * (last - first)));
    });
    field.addEventListener("pointerleave", hide);
    field.addEventListener("blur", hide);
    field.addEventListener("keydown", event => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move) { event.preventDefault(); show(Math.min(steps.length - 1, Math.max(0, current + move))); }
      if (event.key === "Escape") hide();
    });
  }
  for (const wide of document.querySelectorAll(".wide")) {
    const more = Object.assign(document.createElement("p"), { className: "more", textContent: "More columns to the right: scroll the table sideways →" });
    const look = () => {
      const hides = wide.scrollWidth > wide.clientWidth + 1;
      more.hidden = !hides;
      wide.classList.toggle("hides", hides && wide.scrollLeft + wide.clientWidth < wide.scrollWidth - 1);
    };
    wide.before(more);
    wide.addEventListener("scroll", look, { passive: true });
    new ResizeObserver(look).observe(wide);
    look();
  }
})();
