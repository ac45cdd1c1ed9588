"""Kept and dropped text for display: whole characters, with all markup escaped."""

import io
import re

from rich.console import Console

from lightning_unified.models.compressor.evaluation.evaluate import EvaluationOptions, evaluate
from lightning_unified.models.compressor.evaluation.report import tables
from lightning_unified.models.compressor.inference import render


class Bytes:
    """One token a byte."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


def test_segments_join_to_the_text_and_tear_no_character():
    ids = Bytes().encode("a→bc")  # the arrow is three bytes
    kept = [True, False, True, False, False, False]

    assert render.segments(Bytes(), ids, kept=kept) == [("a→", True), ("bc", False)]


def test_bytes_that_are_no_character_are_shown_as_such():
    assert render.segments(Bytes(), [97, 0xE2, 0x86], kept=[True, False, False]) == [("a", True), ("\ufffd", False)]


def test_the_page_marks_tokens_escapes_text_and_needs_nothing_else():
    ids = Bytes().encode("<b>&x")

    page = render.page(Bytes(), ids, kept=[True] * 3 + [False] * 2)

    assert "<mark>&lt;b&gt;</mark><del>&amp;x</del>" in page
    assert "3 of 5 tokens kept" in page
    assert not re.search(r"src=|href=|url\(|<script", page)


def test_the_terminal_shows_the_whole_text_in_two_styles():
    shown = render.terminal(Bytes(), Bytes().encode("keep[drop]"), kept=[True] * 4 + [False] * 6)

    assert shown.plain == "keep[drop]"
    assert [(span.start, span.end) for span in shown.spans] == [(0, 4), (4, 10)]


def test_without_colours_dropped_tokens_stand_in_brackets():
    shown = render.terminal(
        Bytes(), Bytes().encode("keepdropkeep"), kept=[True] * 4 + [False] * 4 + [True] * 4, colours=False
    )

    assert (shown.plain, shown.spans) == ("keep[-drop-]keep", [])


def test_tables_hold_every_method_and_mark_where_intervals_are_apart(subject, texts):
    options = EvaluationOptions(keeps=[0.5], length=24, continuation=8, resamples=200, repeats=1)
    record = evaluate(subject, texts, corpus=texts, options=options)
    console = Console(file=io.StringIO(), width=160)

    for table in tables(record):
        console.print(table)
    shown = console.file.getvalue()

    assert all(row["method"] in shown for row in record["rows"])
    assert re.search(r"random .*▲", shown)
    assert not re.search(r"lm_surprisal .*▲", shown.split("Perplexity")[0])
    assert "Wall time" in shown
