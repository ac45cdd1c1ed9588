"""Longer batches of a fit whose batches run at once."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.cost_model.memory.peak import peak
from lightning_unified.cost_model.trace.interpolation import MisalignedError
from lightning_unified.planner.dry_run import DryRun, StepSpec
from lightning_unified.planner.first_batch.first_step import FirstStep
from lightning_unified.planner.first_batch.lengths import ROOM, is_padded
from lightning_unified.planner.search.combinations import Combination
from lightning_unified.planner.search.longer_rows import LongerRows
from lightning_unified.planner.search.step_traces import StepTraces
from tests.planner.test_row_lengths import ROWS, Attends, Predicts, tokens_of
from tests.support.lanes import some

MIB = 2**20


@pytest.fixture
def traced(monkeypatch, tmp_path):
    """The row lengths of all dry runs."""
    monkeypatch.setenv("LIGHTNING_UNIFIED_CACHE", str(tmp_path))
    lengths = []
    for name in ("run", "go_on"):
        call = getattr(DryRun, name)

        def noted(self, *size, call=call, length=None, **other):
            found = call(self, *size, length=length, **other)
            if found is not None:
                lengths.append(found.length)
            return found

        monkeypatch.setattr(DryRun, name, noted)
    return lengths


def fit(*lengths, kind=Attends, budget="32MiB", **options):
    """Return the strategy of a fit whose batches have these longest rows, and its kinds of events."""
    strategy = UnifiedStrategy(simulate="h200", budget=budget, recompute=False, check_split=False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, **quiet)
    batches = [tokens_of(*length) if isinstance(length, tuple) else tokens_of(length, 40) for length in lengths]
    trainer.fit(kind(**options), DataLoader(batches, batch_size=None))
    assert strategy.recoveries == 0
    return strategy, [event.split(" in ")[0] for event in strategy.events]


def test_a_longer_batch_is_planned_from_the_traces_that_exist(traced):
    _, events = fit(201, 211, 190, 219, 233, 329)

    assert traced == [201, 329, 211]  # the planned batch; a longer length that serves all; the batch that confirms
    assert (events.count("planned"), events.count("another row length planned")) == (1, 4)


@pytest.mark.parametrize("longest", some([219, 224, 329], 219))
def test_a_longer_batch_is_predicted_as_by_a_plan_of_its_own(traced, longest):
    found = fit(201, 211, longest)[0].plan.prediction
    own = max((fit(length)[0].plan.prediction for length in (211, longest)), key=lambda one: one.peak_bytes)

    assert found.reserved_bytes == own.reserved_bytes
    assert found.peak_bytes == pytest.approx(own.peak_bytes, rel=0.03)  # kernels pad each length by other entries


def test_a_batch_longer_than_all_traces_is_traced_before_it_runs(traced, monkeypatch):
    before, look = {}, FirstStep.look

    def noted(self, batch, *others, **options):
        look(self, batch, *others, **options)
        before[batch["tokens"].shape[1]] = max(traced)

    monkeypatch.setattr(FirstStep, "look", noted)
    fit(201, 211, 329, 331, 500)

    assert before == {201: 201, 211: 329, 329: 329, 331: 457, 500: 585}


def test_longer_rows_that_do_not_fit_at_once_are_split(traced):
    strategy, events = fit(201, 900, budget="24MiB")

    assert (events.count("planned"), events.count("another row length planned")) == (2, 0)
    assert strategy.plan.micro_batch_size < ROWS


def test_each_length_is_traced_by_itself_where_values_decide_memory(traced):
    _, events = fit((201, 40), (211, 150), (219, 10), ragged=True)

    assert events.count("planned") == 3
    assert sum(event.startswith("each row length is traced by itself") for event in events) == 1


@pytest.mark.parametrize("backend", some(["cuda", "mps"], "cuda"))
@pytest.mark.parametrize(("kind", "chunk"), some([(Attends, None), (Predicts, 400)], (Attends, None)))
def test_a_longer_length_takes_the_bytes_of_its_own_dry_run(kind, chunk, backend):
    module, combination = kind(), Combination(precision="32-true", loss_chunk=chunk)
    longer = LongerRows(StepTraces(StepSpec(module=module, batch=tokens_of(201, 120), backend=backend)), combination)
    for length in (211, 233, 405):
        longer.reaching(length, up_to=length)
        found = longer.within_reach(tokens_of(length, 70), length=length)
        step = StepSpec(module=module, batch=tokens_of(length, 50), backend=backend, loss_chunk=chunk)
        assert peak(found).bytes == pytest.approx(peak(DryRun(step).run(ROWS)).bytes, rel=0.03)


def test_a_batch_that_takes_other_bytes_than_the_lines_is_refused():
    module = Attends(ragged=True)
    longer = LongerRows(
        StepTraces(StepSpec(module=module, batch=tokens_of(201, 120))), Combination(precision="32-true")
    )
    longer.reaching(211, up_to=211)
    with pytest.raises(MisalignedError):
        longer.within_reach(tokens_of(211, 10), length=211)


@pytest.mark.parametrize("shorter", [40, 201])
def test_a_plan_of_padded_batches_leaves_room_for_longer_rows(traced, shorter):
    strategy, _ = fit((201, shorter), budget="7MiB")
    room, planned = int(ROOM * 7 * MIB), strategy.plan.prediction.reserved_bytes

    assert strategy.plan.micro_batch_size < ROWS
    assert any("left for longer rows" in event for event in strategy.events) == (shorter < 201)
    assert planned <= 7 * MIB - (room if shorter < 201 else 0)


MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("mask", "padded"),
    [
        (MASK, True),
        (MASK.bool().flip(1), True),
        (MASK[:1].expand(2, 4), False),  # no row is shorter
        (MASK[:, :3] * torch.tensor([1, 1, 0]), False),  # no row is as long as the batch
        (2 * MASK, False),  # other entries than 0 and 1
        (MASK.double(), False),
    ],
)
def test_rows_are_padded_if_a_mask_tells_so(mask, padded):
    tokens = torch.full(mask.shape, 7)
    assert is_padded({"tokens": tokens, "mask": mask}, 2) is padded
