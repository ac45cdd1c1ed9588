"""Plans and predictions on a terminal, as Markdown and as a picture."""

import io
import re

import pytest
from rich.console import Console

from lightning_unified.cost_model.generation import Generated, Generation
from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.render import MachinePlan, does_fit, sheet_of, to_markdown, to_png, to_terminal
from lightning_unified.cost_model.render.facts import format_share
from lightning_unified.cost_model.render.tables import categories_table, generation_table, instants_table
from lightning_unified.cost_model.search import Candidate
from lightning_unified.errors import ConfigurationError
from lightning_unified.hardware import Watermarks
from lightning_unified.units import format_duration
from tests.support.lanes import first_cells

MIB, GIB = 2**20, 2**30
PNG = b"\x89PNG\r\n\x1a\n"


def plan(**changes):
    usual = {"micro_batch_size": 4, "recompute": False, "precision": "bf16-mixed", "budget_bytes": 8 * GIB}
    return Plan(**usual | changes)


def prediction(**changes):
    figures = {
        "peak_bytes": 4 * GIB,
        "reserved_bytes": 5 * GIB,
        "categories": {"activations": 3 * GIB, "weights": GIB, "buffers": 0},
        "confidence": "high",
        "seconds": 0.25,
        "instant": "backward of net.blocks.3 (aten.mm)",
        "rows": 4,
        "num_micro_batches": 8,
        "instants": (
            ("forward of net.blocks.0", GIB),
            ("backward of net.blocks.3", 4 * GIB),
            ("optimizer step", 2 * GIB),
        ),
    }
    return Prediction(**figures | changes)


def weighed(rows, *, reserved=5 * GIB, seconds=0.5, fits=True, **changes):
    usual = {"recompute": "none", "precision": "bf16-mixed", "optimizer_kernel": None, "loss_chunk": None}
    return Candidate(
        micro_batch_size=rows,
        num_micro_batches=32 // rows,
        peak_bytes=reserved - GIB,
        reserved_bytes=reserved,
        seconds=seconds,
        fits=fits,
        **usual | changes,
    )


def text_of(planned, width=140, **options):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(to_terminal(sheet_of(planned, **options)))
    return console.export_text()


def line_of(text, start):
    return next(line for line in text.splitlines() if line.lstrip("| ").startswith(start))


def test_each_choice_stands_with_its_reason():
    text = text_of(plan(reasons={"micro_batch_size": "8 rows need 9 GiB", "cap": "no cap"}, prediction=prediction()))

    assert re.search(r"micro-batch +8 micro-batches of up to 4 rows +8 rows need 9 GiB", text)
    assert re.search(r"cap +no cap", text)


def test_the_peak_is_shown_with_its_share_of_the_budget_and_its_place():
    text = text_of(plan(prediction=prediction()))

    assert "4.00 GiB of tensors; 5.00 GiB with the allocator's rounding and caches, 62 % of the budget" in text
    assert "backward of net.blocks.3 (aten.mm)" in text


@pytest.mark.parametrize(
    ("level", "words"),
    [("high", "no value was made up"), ("medium", "decide no shape"), ("low", "batch-size probe before")],
)
def test_a_confidence_says_what_it_means(level, words):
    assert words in line_of(text_of(prediction(confidence=level)), "confidence")


def test_categories_come_in_step_order_without_empty_ones():
    names = [row[0] for row in categories_table(prediction()).rows]

    assert names == ["weights", "activations", "peak of tensors", "reserved by the allocator"]


def test_the_bars_of_categories_are_stacked_and_end_at_the_peak():
    table = categories_table(prediction(), budget_bytes=8 * GIB, watermarks=Watermarks(high=8 * GIB, low=6 * GIB))

    assert table.bars.spans == ((0, 0.125), (0.125, 0.5), (0, 0.5), (0, 0.625), (0, 1.0))
    assert table.bars.marks == (0.75, 1.0)


def test_a_validation_step_stands_between_what_is_taken_and_the_budget():
    table = categories_table(prediction(validation=prediction(reserved_bytes=10 * GIB)), budget_bytes=8 * GIB)

    assert [row[0] for row in table.rows[-3:]] == ["reserved by the allocator", "validation step", "budget"]
    assert table.bars.spans[-3:] == ((0, 0.5), (0, 1.0), (0, 0.8))


def test_a_generation_is_shown_by_what_it_is_for_and_whether_it_fits():
    taken = Generation(weights=4 * GIB, cache=2 * GIB, logits=GIB, prompt=GIB // 2)
    found = Generated(rows=8, prompts=8, prompt=100, new=28, parameters=0, bytes=taken, network="Net", grows=True)
    text = to_markdown(sheet_of(prediction(), more=[generation_table(found, budget_bytes=6 * GIB)]))

    assert "Generation by Net: 8 rows of 100 + 28 tokens" in text
    assert "keys and values, with the copy of a growing cache | 2.00 GiB | 29 % |" in text
    assert "only the larger lives at the peak. It does not fit." in text


def test_bars_of_a_budget_far_above_the_need_are_scaled_by_the_need():
    table = categories_table(prediction(), budget_bytes=100 * GIB, watermarks=Watermarks(high=100 * GIB, low=85 * GIB))

    assert table.bars.spans[-2:] == ((0, 1.0), (0, 1.0))
    assert table.bars.marks == ()
    assert table.remark.endswith("Both lie beyond the bars.")


def test_a_bar_is_as_long_as_its_share_and_marks_are_seen_beside_it():
    text = text_of(plan(prediction=prediction()), watermarks=Watermarks(high=8 * GIB, low=6 * GIB))
    bar = line_of(text, "peak of tensors").partition("100 %")[2].strip()

    assert bar.count("█") == 16
    assert bar.endswith(" ┊      ┊")


def test_the_highest_places_of_each_phase_and_overall_are_shown_in_step_order():
    forward = [(f"forward of {at}", (at * 7 % 20 + 10) * MIB) for at in range(20)]
    table = instants_table(prediction(instants=(("before the step", MIB), *forward, ("optimizer step", 2 * MIB))))
    first, *shown, last = [row[0] for row in table.rows]
    numbers = [int(words.rpartition(" ")[2]) for words in shown]

    assert (first, last) == ("before the step", "optimizer step")
    assert numbers == sorted(numbers) and {forward[at][1] for at in numbers} == {(20 + at) * MIB for at in range(10)}
    assert table.remark == "10 lower places are left out."


def test_alternatives_are_listed_fastest_first_and_the_chosen_one_is_marked():
    others = (weighed(8, reserved=10 * GIB, seconds=0.1, fits=False), weighed(2), weighed(4, seconds=0.25))
    lines = text_of(plan(prediction=prediction(), alternatives=others)).partition("Alternatives")[2].splitlines()
    rows = [line.split()[: 3 + line.startswith("→")] for line in lines if " × " in line]

    assert rows == [["→", "4", "×", "8"], ["2", "×", "16"], ["8", "×", "4"]]
    assert "no, 2.00 GiB over" in "".join(lines)


def test_a_plan_missing_among_its_alternatives_leads_them():
    text = text_of(plan(prediction=prediction(), alternatives=(weighed(2),)))

    assert re.search(r"→ +4 × 8 +none +bf16-mixed +as given +whole +4.00 GiB +5.00 GiB +250 ms +yes", text)


def test_a_plan_that_does_not_fit_says_so_first_and_shows_what_it_would_take():
    refused = plan(
        micro_batch_size=None,
        budget_bytes=GIB,
        alternatives=(weighed(1, fits=False),),
        reasons={"micro_batch_size": "1 row needs 5 GiB"},
    )
    text = text_of(refused)

    assert not does_fit(refused)
    assert re.match(r"verdict +does not fit +1 row needs 5 GiB", text.splitlines()[1])
    assert "Memory each plan needs" in text and "no, 4.00 GiB over" in text and "→" not in text
    assert "the whole batch at once" not in text


def test_what_fits_where_names_each_machine_or_why_not():
    chosen = plan(prediction=prediction(), recomputed="all")
    refused = plan(alternatives=(weighed(1, fits=False), weighed(2, reserved=9 * GIB, fits=False)))
    machines = [
        MachinePlan(name="m2-16gb", backend="mps", pool="unified", budget_bytes=8 * GIB, plan=chosen),
        MachinePlan(name="m1-8gb", backend="mps", pool="unified", budget_bytes=2 * GIB, plan=refused),
        MachinePlan(
            name="rtx", backend="cuda", pool="dedicated", budget_bytes=None, plan=None, why_not="no such precision"
        ),
    ]
    text = text_of(chosen, machines=machines)

    assert re.search(r"m2-16gb +mps, unified +8.00 GiB +yes +4 × 8 +all +bf16-mixed +4.00 GiB +5.00 GiB +250 ms", text)
    assert re.search(r"m1-8gb .* no .*the smallest step needs 5.00 GiB", text)
    assert re.search(r"rtx +cuda, dedicated +unknown +no +no such precision", text)


def test_a_plan_without_a_prediction_is_still_shown():
    text = text_of(plan(micro_batch_size=None))

    assert "the whole batch at once" in text and "Peak by category" not in text


def test_in_a_notebook_a_prediction_is_text_and_displays_nothing_besides(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    displayed = []
    monkeypatch.setattr("rich.jupyter.display", lambda *shown: displayed.append(shown))

    assert "Peak by category" in str(prediction())
    assert displayed == []


def test_brackets_in_names_of_places_are_shown_as_they_are():
    assert "blocks[3]" in text_of(prediction(instant="backward of blocks[3]"))


def test_markdown_has_a_head_a_list_and_a_table_for_each_part():
    page = to_markdown(sheet_of(plan(prediction=prediction(), alternatives=(weighed(2),)), title="Net on m2-16gb"))
    heads = [line for line in page.splitlines() if line.startswith("#")]

    assert heads == [
        "# Net on m2-16gb",
        "## Peak by category",
        "## Peak by place, in the order of the step",
        "## Alternatives",
    ]
    assert "| activations | 3.00 GiB | 75 % |" in page


def test_every_row_of_a_markdown_table_has_as_many_cells_as_its_head():
    instants = (("a|b _c_ <d>", GIB),)
    page = to_markdown(sheet_of(plan(prediction=prediction(instants=instants), alternatives=(weighed(2), weighed(4)))))
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)

    assert len(tables) == 3
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1
    assert r"a\|b \_c\_ \<d\>" in page


def test_notes_of_the_prediction_end_the_page():
    assert to_markdown(sheet_of(prediction(notes=("attention keeps its scores",)))).endswith(
        "## Notes\n\n- attention keeps its scores\n"
    )


@first_cells(1, "shown", ["plan", "far budget", "prediction", "nothing that fits"])
def test_a_picture_is_drawn_of(shown, tmp_path):
    others = (weighed(2), weighed(8, fits=False, reserved=10 * GIB))
    budget = 100 * GIB if shown == "far budget" else 8 * GIB
    chosen = plan(prediction=prediction(), alternatives=others, budget_bytes=budget)
    if shown == "nothing that fits":
        chosen = plan(prediction=None, alternatives=others[1:], budget_bytes=budget)
    path = to_png(
        prediction(instants=()) if shown == "prediction" else chosen,
        tmp_path / "new" / "plan.png",
        watermarks=Watermarks(high=budget, low=budget // 2),
    )

    assert path.read_bytes().startswith(PNG)


def test_a_picture_without_a_prediction_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="has no prediction, so there is nothing to draw"):
        to_png(plan(), tmp_path / "plan.png")


def test_a_picture_in_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"plan\.png cannot be written: .*; name a file that can"):
        to_png(prediction(), tmp_path / "file" / "plan.png")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "unknown"),
        (8.5e-4, "850 µs"),
        (0.0123, "12.3 ms"),
        (4.56, "4.56 s"),
        (200, "3 min 20 s"),
        (1350.4, "22 min 30 s"),
        (11111, "3 h 5 min"),
        (0.9999, "1 s"),
        (119.9, "2 min 0 s"),
    ],
)
def test_seconds_read_as(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(("share", "text"), [(0.004, "0.4 %"), (0.66, "66 %"), (1.2, "120 %"), (28.0, "28 ×")])
def test_shares_read_as(share, text):
    assert format_share(share) == text
