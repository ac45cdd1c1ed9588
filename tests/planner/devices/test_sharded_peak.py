"""The predicted peak of one rank of several, and the one that torch's allocator counts."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator

import lightning_unified
from lightning_unified.cost_model.memory.peak import peak
from lightning_unified.cost_model.trace.trace import Collective, Take
from lightning_unified.errors import ConfigurationError, DryRunError
from lightning_unified.options import Compilation
from lightning_unified.planner.dry_run import DryRun, StepSpec
from lightning_unified.planner.fake.mode import fake_world
from lightning_unified.planner.fake.recorder import Recorder
from lightning_unified.planner.ranks.fake_group import fake_group
from lightning_unified.planner.ranks.sharded_copy import Sharding, sharding_followed
from tests.support.lanes import first_cells, some
from tests.support.modules.ranked_blocks import BLOCKS, ROWS, WIDTH, Net
from tests.support.ranks.counted_peaks import counted_peak, join
from tests.support.ranks.processes import on_ranks


def traced(devices, *, hold=None, num_micro_batches=1):
    with fake_group(devices):
        step = StepSpec(module=Net(), batch=torch.zeros(ROWS, WIDTH), sharding=Sharding(devices=devices, hold=hold))
        return DryRun(step).run(ROWS // num_micro_batches, num_micro_batches)


def collectives(trace):
    return [(event.op, event.phase) for event in trace.events if isinstance(event, Collective)]


def test_the_predicted_peak_of_a_rank_is_the_counted_one(tmp_path):
    counted = on_ranks(counted_peak, 2, tmp_path / "memory", size=2)
    guess = lightning_unified.predict(
        Net(), torch.zeros(ROWS, WIDTH), device="cpu", devices=2, strategy="fsdp"
    ).peak_bytes

    assert guess == pytest.approx(max(counted), rel=0.02)


@pytest.mark.slow
def test_the_predicted_peak_of_a_rank_with_compiled_blocks_is_the_counted_one(tmp_path):
    rows = 512  # activations are most of the peak: eager blocks take 15 % more
    counted = on_ranks(counted_peak, 2, tmp_path / "memory", rows, True, size=2)
    module = Net()
    Compilation("blocks").begin(module)
    with fake_group(2):
        step = StepSpec(module=module, batch=torch.zeros(rows, WIDTH), sharding=Sharding(devices=2, hold=None))
        guess = peak(DryRun(step).run(rows, 1)).bytes

    assert guess == pytest.approx(max(counted), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "hold"), [("fsdp", "auto"), ("unified_fsdp", "parameters"), ("unified_fsdp", "shards")]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_predicted_peak_of_a_transformer_is_the_counted_one(strategy, hold, recompute):
    from benchmarks.planner.harness.ranks import RankCell, measured
    from benchmarks.planner.several_devices import predicted

    cell = RankCell(module="gearhead-small", devices=2, strategy=strategy, hold=hold, recompute=recompute, rows=4)

    assert predicted(cell) == pytest.approx(max(measured(cell)), rel=0.02)


def test_a_step_gathers_each_block_twice_and_reduces_it_once():
    found = collectives(traced(2))

    groups = BLOCKS + 1  # the root gathers once, because it stays whole until the end of the backward pass
    assert found.count(("all-gather", "forward")) == groups
    assert found.count(("all-gather", "backward")) == BLOCKS
    assert found.count(("reduce-scatter", "backward")) == groups


@pytest.mark.slow
def test_every_micro_batch_gathers_and_reduces_unless_parameters_stay_whole():
    assert len(collectives(traced(2, num_micro_batches=2))) == 2 * len(collectives(traced(2)))
    assert len(collectives(traced(2, hold="parameters", num_micro_batches=2))) == len(
        collectives(traced(2, hold="parameters"))
    )


@first_cells(1, "devices", some([1, 2, 4, 8], 2, 8))
def test_a_rank_holds_its_share_of_weights_and_optimizer_state(devices):
    trace = traced(devices)
    whole = sum(one.numel() * 4 for one in Net().parameters())

    held = dict.fromkeys(("weights", "optimizer state"), 0)
    for event in trace.events[:200]:
        if getattr(event, "category", None) in held:
            held[event.category] += event.bytes
    assert held["weights"] == pytest.approx(whole / devices, rel=0.02)
    assert held["optimizer state"] == pytest.approx(2 * whole / devices, rel=0.02)


def test_tensors_that_torch_learns_shapes_from_are_not_counted():
    recorder = Recorder(backend="cpu")
    with fake_group(2), fake_world():
        mesh = init_device_mesh("cpu", (2,))
        whole = TensorMeta(torch.Size([64, 64]), (64, 1), torch.float32)
        spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=whole)
        schema = OpSchema(torch.ops.aten.mul.Tensor, (spec, 2.0), {})
        with recorder, sharding_followed(recorder):
            recorder.begin()
            found = ShardingPropagator()._propagate_tensor_meta_non_cached(schema)

    assert isinstance(found, TensorMeta) and found.shape == (64, 64)
    assert not [event for event in recorder.stop() if isinstance(event, Take)]


@first_cells(
    1, ("strategy", "default"), [("unified_fsdp", True), ("unified_ddp", False), ("fsdp", False), (None, False)]
)
def test_copies_around_the_optimizer_step_count_where_they_are_made(strategy, default):
    devices = {} if strategy is None else {"devices": 2, "strategy": strategy}

    def taken(rollback):
        found = lightning_unified.predict(
            Net(), torch.zeros(1, WIDTH), device="cpu", optimizer_rollback=rollback, **devices
        )
        return found.peak_bytes

    with_copies, without = taken(True), taken(False)
    assert taken(None) == (with_copies if default else without)
    assert (with_copies > without) is (strategy != "fsdp")


def test_a_prediction_leaves_no_process_group_behind():
    traced(4)

    assert not dist.is_initialized()


def in_a_group_of_two():
    join(2)
    dist.barrier()  # the first rank holds the store: it must not end while the other one connects
    try:
        return lightning_unified.predict(
            Net(), torch.zeros(ROWS, WIDTH), device="cpu", devices=8, strategy="fsdp"
        ).peak_bytes
    finally:
        dist.destroy_process_group()


def test_a_process_that_is_one_of_other_ranks_refuses_by_their_number():
    ended = on_ranks(in_a_group_of_two, size=2)

    assert {one.kind for one in ended} == {ConfigurationError.__name__}
    assert "devices=8" in ended[0].text and "one of 2 ranks" in ended[0].text


def test_a_module_that_shards_itself_is_traced_as_it_does():
    class ShardsItself(Net):
        def configure_model(self):
            from torch.distributed.fsdp import FSDPModule, fully_shard

            if not isinstance(self, FSDPModule):
                fully_shard(self, mesh=self.device_mesh["data_parallel"])

    with fake_group(2):
        step = StepSpec(module=ShardsItself(), batch=torch.zeros(ROWS, WIDTH), sharding=Sharding(devices=2))
        assert collectives(DryRun(step).run(ROWS)).count(("all-gather", "forward")) == 1


def test_a_sharded_step_outside_of_a_group_says_where_it_is_traced():
    step = StepSpec(module=Net(), batch=torch.zeros(ROWS, WIDTH), sharding=Sharding(devices=2))

    with pytest.raises(DryRunError, match="2 sharded ranks"):
        DryRun(step).run(ROWS)
