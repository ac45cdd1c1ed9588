"""Code that models share: names imported on first use, and checks of their data.

The checks are of numbers, sizes and tokenizers.
"""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from lightning_unified.models import gearhead
from lightning_unified.models.choices import check_numbers
from lightning_unified.models.commands import shows_colours
from lightning_unified.models.plain_checkpoint import check_same_sizes, check_vocabulary


def test_importing_the_models_packages_imports_neither_torch_nor_lightning():
    names = "classifier, compressor, gearhead, wordle"
    code = f"import sys\nfrom lightning_unified.models import {names}\nassert not {{'torch', 'lightning'}} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("environment", "terminal", "seen"),
    [({}, True, True), ({"NO_COLOR": "1"}, True, False), ({}, False, False), ({"TERM": "dumb"}, True, False)],
)
def test_colours_are_seen_on_a_terminal_that_has_them(environment, terminal, seen):
    console = Console(force_terminal=terminal, file=io.StringIO(), _environ={"TERM": "xterm-256color", **environment})

    assert shows_colours(console) == seen


def test_a_reader_that_closes_the_pipe_ends_a_command_without_a_word():
    end, other = os.pipe()
    os.close(end)
    command = [sys.executable, "-m", "lightning_unified.models.wordle", "solve", "--secret", "crane"]
    done = subprocess.run(command, stdout=other, stderr=subprocess.PIPE, text=True, check=False)
    os.close(other)

    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_name_of_a_model_is_refused_with_those_it_offers():
    with pytest.raises(
        AttributeError, match=r"no attribute 'GearHed'; it offers Diagnoser, GearHead, GearHeadConfig\."
    ):
        _ = gearhead.GearHed


def test_sizes_are_compared_at_every_depth_except_for_dropout():
    own = {"reader": {"layers": 2, "dropout": 0.1}, "reading": "copy"}
    check_same_sizes({"reader": {"layers": 2, "dropout": 0.0}, "reading": "copy"}, own)
    with pytest.raises(ValueError, match=r"layers 1 \(here 2\), reading infill \(here copy\)"):
        check_same_sizes({"reader": {"layers": 1}, "reading": "infill"}, own)


@pytest.mark.parametrize(
    ("given", "trained", "message"),
    [
        ({"a": 0, "b": 1}, None, "has 2 tokens, the model's vocabulary is 1; .* set the model's vocabulary=2"),
        ({"a": 0}, {"b": 0}, r"trained with another tokenizer \(1 tokens\)"),
    ],
)
def test_a_tokenizer_of_another_model_is_refused(given, trained, message):
    check_vocabulary({"a": 0}, rows=1, trained={"a": 0})
    with pytest.raises(ValueError, match=message):
        check_vocabulary(given, rows=1, trained=trained)


def test_numbers_out_of_range_are_refused_by_name():
    check_numbers(positive={"eps": 1e-8}, not_negative={"weight_decay": 0.0})
    with pytest.raises(ValueError, match=r"eps=0\.0 must be above 0"):
        check_numbers(positive={"eps": 0.0}, not_negative={})
    with pytest.raises(ValueError, match="warmup_steps=-1 may not be below 0"):
        check_numbers(positive={}, not_negative={"warmup_steps": -1})
