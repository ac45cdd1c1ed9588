"""A run orders its plans by kept speeds, and else measures as little as its plan needs."""

import pytest

from lightning_unified.cost_model.rates import Rates
from lightning_unified.cost_model.rates.calibration import Calibration
from lightning_unified.planner.dry_run import StepSpec
from lightning_unified.planner.first_batch.gather import RunSpeeds
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.planner import Planner
from lightning_unified.planner.search.step_traces import SizeLimits, StepTraces
from lightning_unified.step.recovery.budget_watch import BudgetWatch
from tests.support.lanes import first_cells
from tests.support.zoo.dry_run import Perceptron

RATES = Rates(name="kept", flops={"float32": 1e12}, bandwidth=1e11, launch=1e-5, kernel=0.0, part=0.0)


@pytest.fixture
def calibration(tmp_path):
    return Calibration.load("box", directory=tmp_path)


def speeds(calibration, precision="32-true"):
    return RunSpeeds(BudgetWatch("auto"), calibration, precision=precision)


def test_saved_speeds_are_used(calibration):
    calibration.keep(rates=RATES)

    assert speeds(calibration).rates == RATES
    assert speeds(calibration).describe() == "of kept, measured before and kept"


def test_brief_speeds_are_named_as_such_and_not_saved(calibration):
    own = speeds(calibration, "bf16-mixed")

    assert set(own.rates.flops) == {"float32", "bfloat16"}
    assert "measured briefly" in own.describe()
    assert calibration.rates is None


@first_cells(1, ("rows", "could"), [(24, True), (10, False)])  # 12 and 12, or 8, 8, 8; 5 and 5, and no 8
def test_alignment_matters_where_an_unaligned_split_has_an_aligned_neighbour(rows, could):
    step = StepSpec(module=Perceptron(), batch=Perceptron.batch(rows))
    planner = Planner(StepTraces(step, limits=SizeLimits(micro_batch_size=rows // 2)))
    choice = planner.choose([Combination(precision="32-true")], budget_bytes=1 << 40, rates=RATES)

    assert choice.best.num_micro_batches == 2
    assert planner.could_be_aligned(choice) is could
