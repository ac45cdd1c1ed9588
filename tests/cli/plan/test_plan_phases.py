"""A fit of several phases is planned phase by phase, on the batches that are split.

Sampling is not traced.
"""

import json
from dataclasses import replace

import pytest

from lightning_unified.cli.plan.command import main
from lightning_unified.cli.plan.planner_calls import with_phases
from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.render import does_fit
from tests.support import ROOT

CONF = str(ROOT / "conf")


def plan(*, taken, rows=4, generation=0):
    found = Prediction(
        peak_bytes=taken, reserved_bytes=taken, categories={}, confidence="high", seconds=None, instant="", rows=rows,
        generation_bytes=generation,
    )  # fmt: skip
    return Plan(micro_batch_size=rows, recompute=False, precision="32-true", budget_bytes=100, prediction=found)


def test_phases_that_fit_are_shown_beside_the_main_one():
    found = with_phases(plan(taken=50), {"imitation": plan(taken=90, rows=2)})

    assert found.prediction.reserved_bytes == 50
    assert found.reasons["other phases"] == "imitation: 1 micro-batch of 2 rows, 90 B"


def test_a_phase_that_does_not_fit_is_what_is_shown():
    found = with_phases(plan(taken=50), {"imitation": plan(taken=120)})

    assert found.prediction.reserved_bytes == 120
    assert found.reasons["other phases"] == "imitation: does not fit"


def test_a_fit_of_one_phase_is_as_it_was():
    only = plan(taken=50)

    assert with_phases(only, {}) is only


def test_a_generation_that_does_not_fit_is_a_plan_that_does_not():
    assert does_fit(plan(taken=50, generation=100))
    assert not does_fit(replace(plan(taken=50, generation=101)))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["wordle-tiny", "wordle", "wordle/qwen2_5_3b"])
def test_wordle_is_planned_without_weights_and_without_data(model, capsys):
    pytest.importorskip("transformers")
    code = main(
        [f"model={model}", "simulate=m2-16gb", "--json", "data.words=/nowhere", "data.pretrained=/nowhere"],
        config_path=CONF,
    )
    found = json.loads(capsys.readouterr().out)
    prediction = found["plan"]["prediction"]

    assert (code, found["fits"]) == (0, True)
    assert found["effective_batch_size"] % 4 == 0  # completions, and not prompts
    assert 0 < prediction["generation_bytes"] < found["budget_bytes"]
    assert 0 < prediction["generation_seconds"] < prediction["seconds"]
    assert prediction["peak_bytes"] == max(count for _, count in prediction["instants"])
    assert found["plan"]["reasons"]["other phases"].startswith("imitation: ")
