"""Open every page of the built manual in a browser, and name what is wrong with it.

Usage: `python docs/_site/browse.py [PAGE ...] [--shots FOLDER]`, after `make docs`, with `pip install playwright` and `playwright install chromium`
(or `--browser /usr/bin/chromium`). Each page is opened at 1280 and at 400 px, in light and in dark. Checked are: errors in the console, failed
requests, pictures that do not load, links and anchors without a target, pages that scroll sideways, and text with a contrast below 3:1.
`--shots` stores a picture of each page.
"""

import argparse
import functools
import http.server
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from playwright.sync_api import Browser, Page, sync_playwright

BUILT = Path(__file__).parents[1] / "_build" / "html"
WIDTHS = (1280, 400)
SCHEMES = ("light", "dark")

LOOK = """() => {
  const found = [], root = document.documentElement, wide = root.clientWidth;
  if (root.scrollWidth > wide + 1) {
    const out = [...document.querySelectorAll('article *, main *, header *')].filter(e => e.getBoundingClientRect().right > wide + 1);
    const inside = e => { for (let p = e.parentElement; p; p = p.parentElement)
      if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) return true; return false; };
    const first = out.find(e => !inside(e));
    found.push(`the page is ${root.scrollWidth} px wide` + (first ? `, by <${first.tagName.toLowerCase()} class="${first.className}"> ${first.textContent.trim().slice(0, 50)}` : ''));
  }
  for (const image of document.images)
    if (image.offsetParent && (!image.complete || !image.naturalWidth)) found.push(`picture ${image.getAttribute('src')} does not load`);
  const channels = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const back = e => { for (let p = e; p; p = p.parentElement) { const c = channels(getComputedStyle(p).backgroundColor);
    if (c.length === 3 || c[3] === 1) return c; } return matchMedia('(prefers-color-scheme: dark)').matches ? [0, 0, 0] : [255, 255, 255]; };
  const weak = new Map(), walk = document.createTreeWalker(document.querySelector('article') || document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, e = node.parentElement;
    if (!node.data.trim() || !e.offsetParent || getComputedStyle(e).visibility === 'hidden' || e.closest('svg, button, .headerlink')) continue;
    const style = getComputedStyle(e); if (style.opacity === '0') continue;
    const [a, b] = [light(channels(style.color)), light(back(e))].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    const key = e.tagName.toLowerCase() + '.' + e.className;
    if (ratio < 3 && !weak.has(key)) weak.set(key, `contrast ${ratio.toFixed(1)}:1 of "${node.data.trim().slice(0, 30)}" in ${key}`);
  }
  return {found: [...found, ...weak.values()], links: [...document.querySelectorAll('a[href]')].map(a => a.href),
          ids: [...document.querySelectorAll('[id]')].map(e => e.id)};
}"""


def serve(built: Path) -> str:
    """Serve the folder from this process; return its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(built)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/"


def opened(page: Page, address: str) -> tuple[list[str], list[str], list[str]]:
    """Open a page; return what is wrong with it, its links, and its anchors."""
    said: list[str] = []
    listeners = {
        "console": lambda message: said.append(f"console: {message.text}") if message.type == "error" else None,
        "pageerror": lambda error: said.append(f"script: {error}"),
        "response": lambda response: (
            said.append(f"{response.status}: {response.url}") if response.status >= 400 else None
        ),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    page.goto(address, wait_until="load")
    seen = page.evaluate(LOOK)
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    return said + seen["found"], seen["links"], seen["ids"]


def browse(browser: Browser, built: Path, names: list[str], shots: Path | None) -> dict[str, list[str]]:
    """Return the faults of the named pages, each with the widths and schemes in which it was seen."""
    root, faults = serve(built), {}
    links: dict[str, list[str]] = {}
    anchors: dict[str, set[str]] = {}
    for scheme in SCHEMES:
        for width in WIDTHS:
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
            for name in names:
                found, links[name], ids = opened(page, root + name)
                anchors[name] = set(ids)
                for fault in found:
                    faults.setdefault(f"{name}: {fault.replace(root, '')}", []).append(f"{width} {scheme}")
                if shots is not None:
                    shots.mkdir(parents=True, exist_ok=True)
                    page.screenshot(path=shots / f"{name.replace('/', '.')}-{width}-{scheme}.png", full_page=True)
            page.close()
    for name, targets in links.items():
        for fault in sorted(
            set(filter(None, (_lost(urljoin(root + name, to), root, built, anchors) for to in targets)))
        ):
            faults[f"{name}: {fault}"] = ["link"]
    return faults


def _lost(target: str, root: str, built: Path, anchors: dict[str, set[str]]) -> str:
    """Return what is wrong with a link inside the manual; "" if its file and anchor exist."""
    if not target.startswith(root):
        return ""
    address, anchor = urldefrag(target)
    name = unquote(urlsplit(address).path).lstrip("/") or "index.html"
    if not (built / name).is_file():
        return f"link to {name}, which does not exist"
    known = anchors.get(name)
    return (
        ""
        if not anchor or known is None or unquote(anchor) in known
        else f"link to {name}#{anchor}, which does not exist"
    )


def main() -> int:
    """Check the pages; return 1 if one has a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="such as tutorials/05_hydra.html; default: all")
    parser.add_argument("--shots", type=Path, help="folder for pictures of the pages")
    parser.add_argument("--browser", help="path of a Chromium; default: playwright's own")
    parser.add_argument("--built", type=Path, default=BUILT, help="folder of the manual")
    options = parser.parse_args()
    names = options.pages or sorted(str(path.relative_to(options.built)) for path in options.built.rglob("*.html"))
    if not names:
        sys.exit(f"{options.built} has no pages; make docs builds them.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser)
        faults = browse(browser, options.built, names, options.shots)
        browser.close()
    for fault, where in faults.items():
        print(f"{fault} ({', '.join(where)})")
    print(f"{len(names)} pages, {len(WIDTHS) * len(SCHEMES)} times each: {len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
