"""`lightning_unified.predict` and `.plan`: a step's memory and plan, without a run."""

from functools import partial

import lightning as L
import pytest
import torch

import lightning_unified
from lightning_unified.cost_model.rates import Alignment, Rates
from lightning_unified.cost_model.rates.calibration import Calibration, calibrated_machines
from lightning_unified.cost_model.render import does_fit
from lightning_unified.errors import ConfigurationError
from lightning_unified.models.gearhead.module import GearHead
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planner.predict import plan_many
from lightning_unified.planner.search import planner
from lightning_unified.planner.search.combinations import combinations_to_compare
from lightning_unified.planner.search.phases import Phases
from lightning_unified.units import format_bytes
from tests.support.lanes import first_cells

MIB = 2**20
RATES = Rates(name="made up", flops={"float32": 1e12}, bandwidth=1e11, launch=1e-6, kernel=1e-6, part=1e-4)


class Stack(L.LightningModule):
    def __init__(self, depth=2):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64), torch.nn.Tanh())
            for _ in range(depth)
        )

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = batch + block(batch)
        return batch.square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


BATCH = torch.zeros(16, 128, 64)


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    return Stack()


@pytest.fixture(scope="module")
def whole(module):
    return lightning_unified.predict(module, BATCH, device="cuda")


@pytest.fixture(scope="module")
def tight(module, whole):
    return lightning_unified.plan(module, BATCH, budget=int(0.75 * whole.reserved_bytes), device="cuda", rates=RATES)


def test_a_prediction_leaves_module_batch_and_generators_as_they_were(module):
    weights, generator = [one.clone() for one in module.parameters()], torch.get_rng_state()
    lightning_unified.predict(module, BATCH, device="mps", micro_batch_size=4)

    assert all(torch.equal(one, before) for one, before in zip(module.parameters(), weights, strict=True))
    assert all(one.grad is None for one in module.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


SEEN = []


def numbers():
    yield from range(9)


class LeavesTraces(Stack):
    """Changes a global and a class attribute in a helper method, and holds iterators."""

    steps = 0

    def __init__(self):
        super().__init__()
        self.kept = [numbers(), (1, numbers()), iter([1, 2]), map(abs, [1, 2])]

    def training_step(self, batch, batch_idx):
        self.note(next(self.kept[2]))
        return super().training_step(batch, batch_idx)

    def note(self, number):
        SEEN.append(number)
        type(self).steps += 1


def test_dry_runs_leave_no_trace_in_globals_classes_and_iterators():
    module = LeavesTraces()
    before = list(module.kept)
    lightning_unified.predict(module, BATCH, device="cuda")
    lightning_unified.plan(module, BATCH, device="cuda", budget="1GiB", rates=RATES)

    assert SEEN == [] and LeavesTraces.steps == 0
    assert all(one is other for one, other in zip(module.kept, before, strict=True))
    assert list(module.kept[2]) == [1, 2]


def test_weights_are_counted_to_the_byte(module, whole):
    assert whole.categories["weights"] == sum(-(-one.numel() * 4 // 512) * 512 for one in module.parameters())


def test_weights_on_the_meta_device_are_predicted_alike(whole):
    with torch.device("meta"):
        light = Stack()

    assert lightning_unified.predict(light, BATCH, device="cuda").peak_bytes == whole.peak_bytes


def test_smaller_micro_batches_take_less(module, whole):
    split = lightning_unified.predict(module, BATCH, device="cuda", micro_batch_size=4)

    assert (split.rows, split.num_micro_batches) == (4, 4)
    assert split.peak_bytes < whole.peak_bytes


def test_recomputation_takes_less(module, whole):
    assert lightning_unified.predict(module, BATCH, device="cuda", recompute=True).peak_bytes < whole.peak_bytes


def test_without_an_optimizer_step_there_is_no_state(module, whole):
    without = lightning_unified.predict(module, BATCH, device="cuda", optimizer_step=False)

    assert "optimizer state" not in without.categories
    assert whole.peak_bytes - without.peak_bytes >= 2 * sum(4 * one.numel() for one in module.parameters())


def test_seconds_are_given_where_the_speed_is_known(module, whole):
    assert whole.seconds is None
    assert lightning_unified.predict(module, BATCH, device="cuda", rates=RATES).seconds > 0


def test_an_unknown_device_is_refused_by_name(module):
    with pytest.raises(ConfigurationError, match=r"device='tpu': steps are predicted for cpu, cuda, rocm, mps"):
        lightning_unified.predict(module, BATCH, device="tpu")


def test_what_fits_runs_as_the_user_has_it(module, whole):
    plan = lightning_unified.plan(module, BATCH, budget=2 * whole.reserved_bytes, device="cuda", rates=RATES)

    assert (plan.micro_batch_size, plan.recompute, plan.alternatives) == (16, False, ())


def test_a_smaller_budget_gives_a_plan_that_fits(tight, whole):
    assert tight.prediction.reserved_bytes <= 0.75 * whole.reserved_bytes
    assert tight.micro_batch_size < 16 or tight.recompute
    assert tight.alternatives


def test_segments_expand_where_the_whole_batch_does_not_fit(module, whole, tight, monkeypatch):
    monkeypatch.setattr(planner, "_LEAST_TO_EXPAND", 0)
    noted, expand = [], planner.Planner.expand_segments
    monkeypatch.setattr(planner.Planner, "expand_segments", lambda self: (noted.append(1), expand(self))[1])
    given = {"device": "cuda", "rates": RATES}
    ample = lightning_unified.plan(module, BATCH, budget=whole.reserved_bytes, **given)
    assert (ample.prediction.reserved_bytes, noted) == (whole.reserved_bytes, [])

    short = lightning_unified.plan(module, BATCH, budget=whole.reserved_bytes - MIB, **given)
    assert noted == [1]
    assert short.prediction.reserved_bytes % (2 * MIB) == 0
    assert tight.prediction.peak_bytes <= short.prediction.reserved_bytes <= whole.reserved_bytes - MIB


@first_cells(1, ("strategy", "expanded"), [("unified_ddp", [1]), ("unified_fsdp", [])])
def test_segments_of_replicas_expand_and_those_of_shards_stay(module, monkeypatch, strategy, expanded):
    monkeypatch.setattr(planner, "_LEAST_TO_EXPAND", 0)
    noted, expand = [], planner.Planner.expand_segments
    monkeypatch.setattr(planner.Planner, "expand_segments", lambda self: (noted.append(1), expand(self))[1])
    given = {"device": "cuda", "rates": RATES, "devices": 2, "strategy": strategy}
    whole = lightning_unified.plan(module, BATCH, budget="1TiB", **given).prediction
    assert noted == []

    short = lightning_unified.plan(module, BATCH, budget=whole.reserved_bytes - MIB, **given)
    assert noted == expanded
    assert short.prediction.reserved_bytes <= whole.reserved_bytes - MIB


def test_a_step_that_never_fits_is_refused_with_sizes_that_would(module):
    plan = lightning_unified.plan(module, BATCH, budget="2MiB", device="cuda", rates=RATES)

    assert (plan.prediction, plan.micro_batch_size) == (None, None)
    assert plan.reasons["micro_batch_size"].startswith("no plan fits into 2.00 MiB")
    assert min(one.reserved_bytes for one in plan.alternatives) > 2 * MIB


@pytest.mark.slow
def test_a_later_phase_is_searched_as_a_fit_searches_it_unless_it_does_not_fit(module, tight):
    given = {"device": "cuda", "rates": RATES}
    phases, budgets = Phases(), (tight.budget_bytes, tight.budget_bytes, MIB)
    first, later, short = (lightning_unified.plan(module, BATCH, budget=one, phases=phases, **given) for one in budgets)

    assert first.alternatives == tight.alternatives
    assert (later.micro_batch_size, later.recomputed) == (first.micro_batch_size, first.recomputed)
    assert later.prediction.step_bytes == first.prediction.step_bytes
    assert len(later.alternatives) < len(first.alternatives)
    assert short.alternatives == lightning_unified.plan(module, BATCH, budget=MIB, **given).alternatives


@pytest.mark.slow
def test_machines_of_one_backend_are_planned_alike_under_one_budget(module, tight):
    machines = dict.fromkeys(("one", "other"), ("cuda", tight.budget_bytes, RATES))
    plans = plan_many(module, BATCH, machines)

    assert plans["one"].prediction.peak_bytes == plans["other"].prediction.peak_bytes == tight.prediction.peak_bytes


def test_a_device_that_is_not_here_has_the_published_speeds_of_a_typical_one(module, monkeypatch):
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    found = lightning_unified.plan(module, BATCH, budget="1GiB", device="mps")
    same = lightning_unified.plan(
        module, BATCH, budget="1GiB", device="mps", rates=lightning_unified.tabled_rates("Apple M2")
    )

    assert found.prediction.seconds == same.prediction.seconds > 0
    assert "Apple M2" in found.reasons["speeds"]
    assert "mps is not here to be measured" in found.reasons["speeds"]


def test_a_step_that_fits_after_the_allocator_freed_its_caches_shows_the_limit(module, whole, monkeypatch):
    for name in ("search.planner", "other_phases"):
        monkeypatch.setattr(f"lightning_unified.planner.{name}.fits_within", lambda *_args, **_kwargs: True)
    larger = torch.zeros(128, 128, 64)
    unhindered = lightning_unified.predict(module, BATCH, device="cuda", validation_batch=larger).validation
    limit = max(whole.peak_bytes, unhindered.peak_bytes) + 1
    assert limit < min(whole.reserved_bytes, unhindered.reserved_bytes)

    plan = lightning_unified.plan(module, BATCH, budget=limit, device="cuda", rates=RATES, validation_batch=larger)
    validation = plan.prediction.validation

    assert plan.prediction.reserved_bytes == validation.reserved_bytes == limit
    assert does_fit(plan)
    assert f"{format_bytes(limit)} of {format_bytes(limit)}" in plan.reasons["micro_batch_size"]
    assert f"{format_bytes(limit)} of {format_bytes(limit)}" in plan.reasons["validation"]


def test_every_alternative_shows_the_peak_that_its_own_prediction_has(module, tight):
    compared = {each.recompute: each for each in tight.alternatives if each.recompute in ("none", "all blocks")}
    assert compared
    for recompute, each in compared.items():
        policy = RecomputePolicy(blocks="all" if recompute == "all blocks" else 0)
        own = lightning_unified.predict(
            module, BATCH, device="cuda", micro_batch_size=each.micro_batch_size, recompute=policy
        )
        assert each.peak_bytes == own.peak_bytes


class Sampler(GearHead):
    """Samples from its network before each step."""

    def generations(self, batch):
        return {"rows": 8, "prompts": 2, "prompt": 16, "new": 33}


@pytest.mark.slow
def test_the_seconds_of_a_step_include_the_sampling_before_it():
    sizes = {"width": 32, "heads": 2, "layers": 1, "feed_forward": 64, "positions": 64}
    batch = {"input_ids": torch.zeros(8, 64, dtype=torch.long), "labels": torch.zeros(8, 64, dtype=torch.long)}
    steps, samples = (
        lightning_unified.plan(
            kind(**sizes), batch, budget="1GiB", device="mps", rates=RATES, recompute=False, loss_chunk=False
        )
        for kind in (GearHead, Sampler)
    )
    sampling = samples.prediction.generation_seconds

    assert steps.prediction.generation_seconds == 0
    assert sampling > 33 * RATES.launch
    assert samples.prediction.seconds == pytest.approx(steps.prediction.seconds + sampling)
    assert samples.prediction.peak_bytes == steps.prediction.peak_bytes
    assert "of them for sampling before it" in str(samples)


def test_plans_and_predictions_print_as_tables(module, tight, whole, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    texts = {"Prediction": str(whole), "Plan": str(tight)}

    for title, text in texts.items():
        assert text.splitlines()[0] == title
        assert "Peak by category" in text
        assert "\x1b" not in text
    assert format_bytes(whole.peak_bytes) in texts["Prediction"]
    assert f"of {format_bytes(tight.budget_bytes)}" in texts["Plan"]
    assert "Alternatives" in texts["Plan"]


def test_settings_begin_with_the_users_own_and_the_one_that_needs_least():
    policies = [RecomputePolicy(blocks=blocks, of=8) for blocks in (0, *range(1, 8), "all")]
    combinations = combinations_to_compare("32-true", policies=policies, kernels=["fused"], chunks=[None, 1024])

    assert [str(one.recompute) for one in combinations[:2]] == ["none", "all blocks"]
    assert combinations[0].changes == 0
    assert len(combinations) == len(set(combinations)) < 20


def test_a_validation_step_has_optimizer_state_and_no_gradients(module, whole):
    found = lightning_unified.predict(module, BATCH, device="cuda", validation_batch=torch.zeros(64, 128, 64))

    assert found.peak_bytes == whole.peak_bytes
    assert (found.validation.rows, found.validation.num_micro_batches) == (64, 1)
    assert found.validation.categories["optimizer state"] == whole.categories["optimizer state"]
    assert "gradients" not in found.validation.categories


def test_a_plan_states_the_micro_batches_of_a_larger_validation_batch(module, whole):
    batch = torch.zeros(512, 128, 64)
    plan = lightning_unified.plan(
        module, BATCH, budget=2 * whole.reserved_bytes, device="cuda", rates=RATES, validation_batch=batch
    )

    assert plan.micro_batch_size == 16
    assert plan.prediction.validation.num_micro_batches > 1
    assert plan.prediction.validation.reserved_bytes <= plan.budget_bytes
    assert plan.reasons["validation"].startswith(
        f"{plan.prediction.validation.num_micro_batches} micro-batches of up to "
    )


def test_this_machine_s_speeds_are_measured_once_and_what_alignment_gave_is_said(module, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_UNIFIED_CACHE", str(tmp_path))
    paid = {"device": "this CPU", "dtype": "float32", "seconds_per_row": {}, "without": {"multiple of 8": 1.5}}
    alignment = Alignment(**paid, multiple=8, gain=1.5, source="made up")
    monkeypatch.setattr("lightning_unified.cost_model.rates.calibration.measure_rates", lambda _: RATES)
    monkeypatch.setattr("lightning_unified.cost_model.rates.calibration.measure_alignment", lambda _: alignment)
    plan = lightning_unified.plan(module, BATCH, budget="1GiB", device="cpu")

    assert plan.reasons["alignment"] == alignment.describe()
    assert [Calibration.load(name).alignment for name in calibrated_machines()] == [alignment]


def test_of_a_machine_that_is_not_this_one_no_alignment_is_known(tight):
    assert tight.reasons["alignment"].startswith("not measured, because the machine is not this one")


def test_a_plan_for_compiled_blocks_counts_their_graphs_and_leaves_the_module(module, whole):
    before = {name: dict(vars(child)) for name, child in module.named_modules()}
    planned = partial(lightning_unified.plan, module, BATCH, budget="8GiB", device="cuda", rates=RATES)
    blocks, parts = (
        lightning_unified.predict(module, BATCH, device="cuda", compile=one) for one in ("blocks", "whole")
    )

    assert "compile" not in planned().reasons
    assert planned(compile="blocks").reasons["compile"].startswith("as asked: 2 blocks")
    assert planned(compile="whole").prediction.peak_bytes == parts.peak_bytes
    assert blocks.peak_bytes < whole.peak_bytes  # kernels fuse the activations
    assert {name: dict(vars(child)) for name, child in module.named_modules()} == before


@pytest.mark.parametrize(
    ("asked", "devices", "why"), [("auto", 1, "length of a run"), ("blocks", 2, "several devices")]
)
def test_what_no_plan_knows_of_compilation_is_refused(module, asked, devices, why):
    strategy = None if devices == 1 else "ddp"
    with pytest.raises(ConfigurationError, match=why):
        lightning_unified.predict(module, BATCH, device="cuda", compile=asked, devices=devices, strategy=strategy)
