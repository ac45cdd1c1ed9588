"""The time of a step follows from its operations: overlapped on a GPU, added on a CPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_unified.cost_model.candidates import even_splits
from lightning_unified.cost_model.generation import Generated, Generation
from lightning_unified.cost_model.rates import Rates
from lightning_unified.cost_model.rates.cost import sampling_seconds, split_seconds, step_seconds
from lightning_unified.cost_model.trace.sampling import with_sampling
from lightning_unified.cost_model.trace.trace import Trace, Work
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.step.split import split_rows
from tests.support.memory.made_traces import MadeTraces, rates

KEPT = RecomputePolicy(blocks="all", keep_attention=True)


def trace(*works, backend="cuda", num_micro_batches=1):
    return Trace(events=works, rows=4, backend=backend, num_micro_batches=num_micro_batches)


BIG = Work("mm", "forward", flops=10**12, moved=10**6, dtype="float32")
COPY = Work("copy", "forward", moved=10**11)
VIEW = Work("view", "forward")


def test_a_product_takes_its_operations_and_a_copy_its_bytes():
    assert step_seconds(trace(BIG), rates()) == pytest.approx(1 + 2e-6)
    assert step_seconds(trace(COPY), rates()) == pytest.approx(1 + 2e-6)


def test_small_products_do_not_reach_the_peak():
    half = int(rates().kernel * rates().flops["float32"])

    assert rates(launch=0).kernel_seconds(flops=half, moved=0, dtype="float32") == pytest.approx(2 * half / 1e12)


def test_a_gpu_works_while_the_host_launches_and_a_cpu_does_one_after_the_other():
    works = [BIG, *[VIEW] * 1000]
    launches = 1001 * rates().launch

    assert step_seconds(trace(*works), rates()) == pytest.approx(1 + 2e-6)
    assert step_seconds(trace(*works, backend="cpu"), rates()) == pytest.approx(1 + 2e-6 + launches)


def test_a_step_of_tiny_operations_lasts_as_long_as_their_launches():
    works = [Work("add", "forward", moved=64)] * 1000

    assert step_seconds(trace(*works), rates()) == pytest.approx(1000 * rates().launch)


def test_a_replayed_module_costs_the_host_one_launch_of_all_its_operations():
    inside = [Work("add", "forward", place="net.blocks.0", moved=64)] * 1000
    outside = [Work("add", "forward", place="network", moved=64)] * 1000
    added_up = [Work("aten.add_.Tensor", "backward", moved=64)] * 1000
    replayed = {"rows": 4, "backend": "cuda", "replayed": ("net",)}
    launch, kernel = rates().launch, rates().kernel_seconds(flops=0, moved=64, dtype="")

    assert step_seconds(Trace(events=(*outside, *inside), **replayed), rates()) == pytest.approx(
        1100 * launch, rel=1e-6
    )
    assert step_seconds(Trace(events=(*inside, *added_up), **replayed), rates(kernel=0)) < 101 * launch
    assert step_seconds(Trace(events=(*inside, *inside), **replayed), rates()) >= 2000 * kernel


def test_saving_attention_costs_the_host_twice_for_each_forward_operation():
    works = [Work("add", "forward", moved=64)] * 1000
    kept = Trace(events=works, rows=4, backend="cuda", options={"recompute": str(KEPT)})

    assert step_seconds(kept, rates()) == pytest.approx((1000 + 2 * 2500) * rates().launch)


def test_an_optimizer_loop_costs_more_than_one_fused_kernel():
    fused = [Work("_fused_adamw_", "optimizer step", moved=7 * 10**6)]
    loop = [Work("add_", "optimizer step", moved=3 * 10**4)] * 1400

    assert step_seconds(trace(*loop), rates()) > 10 * step_seconds(trace(*fused), rates())


def test_what_precedes_the_step_and_validation_cost_nothing():
    outside = [Work("copy", "setup", moved=10**11), Work("mm", "validation", flops=10**12, dtype="float32")]

    assert step_seconds(trace(*outside, BIG), rates()) == step_seconds(trace(BIG), rates())


def test_an_unknown_dtype_is_costed_as_float32():
    odd = Work("mm", "forward", flops=10**12, dtype="float64")

    assert step_seconds(trace(odd), rates()) == pytest.approx(1 + 2e-6)


@pytest.mark.parametrize(("backend", "faster"), [("cuda", 8), ("mps", 1), ("cpu", 1)])
def test_convolutions_of_float32_run_as_tf32_on_cuda_alone(backend, faster):
    both = Rates(**{**rates(launch=0, kernel=0).to_dict(), "flops": {"float32": 1e12, "tf32": 8e12}})
    work = Work("aten.convolution.default", "forward", flops=10**12, dtype="float32")

    assert step_seconds(trace(work, backend=backend), both) == pytest.approx(1 / faster)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 7])
def test_even_micro_batches_cost_as_much_as_their_common_trace(backend, num_micro_batches):
    traces = MadeTraces(backend=backend)
    whole = step_seconds(traces.at(5, num_micro_batches=num_micro_batches), rates(part=1e-4))
    split = split_seconds(
        lambda rows, num_micro_batches: traces.at(rows, num_micro_batches=num_micro_batches),
        [5] * num_micro_batches,
        rates(part=1e-4),
    )

    assert split == pytest.approx(whole, rel=1e-3)  # a first micro-batch makes gradients, later ones add to them


def test_a_smaller_last_micro_batch_costs_less_than_a_full_one():
    traces = MadeTraces()

    def seconds(sizes):
        return split_seconds(
            lambda rows, num_micro_batches: traces.at(rows, num_micro_batches=num_micro_batches), sizes, rates()
        )

    assert seconds([4, 4]) > seconds([4, 3]) > seconds([3, 3])


@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 5))
def test_the_splits_are_those_of_the_step(units, unit, least):
    rows = units * unit
    splits = even_splits(rows, unit=unit, least=least)

    assert [split[0] for split in splits] == sorted({split[0] for split in splits}, reverse=True)
    for split in splits:
        assert list(split) == split_rows(rows, micro_batch_size=split[0], unit=unit, least=least)
    smallest = split_rows(rows, micro_batch_size=unit, unit=unit, least=least)
    assert splits[-1][0] == max(smallest)


def test_no_split_exceeds_the_largest_allowed_micro_batch():
    assert even_splits(10, micro_batch_size=4) == [(4, 3, 3), (3, 3, 2, 2), (2, 2, 2, 2, 2), (1,) * 10]


def test_a_batch_that_is_no_multiple_of_its_unit_runs_whole():
    assert even_splits(10, unit=4) == [(10,)]


def test_rows_that_are_none_are_refused():
    with pytest.raises(
        ValueError, match="rows=0, unit=1, least=1, micro_batch_size=None: give positive numbers of rows"
    ):
        even_splits(0)


@pytest.mark.parametrize(("backend", "launches"), [("mps", 3 * 2), ("cuda", 2 + 2)])
def test_sampling_is_a_pass_over_the_prompts_and_one_for_each_further_token(backend, launches):
    step = MadeTraces(works=((0, 10**9, 0, 10**6), (0, 10**9, 0, 10**6)), backend=backend).at(4)
    count = Generation(weights=10**8, cache=10**7, logits=0, prompt=0)
    sampled = Generated(rows=8, prompts=2, prompt=100, new=3, parameters=10**6, bytes=count, network="", grows=False)
    slow_host = rates(launch=1.0)
    speeds = rates(launch=0.0)
    prompts = 2 * 2e-6 + max(2 * 10**6 * 2 * 100 / 1e12, 10**8 / 1e11)
    tokens = 2 * 2 * 2e-6 + 2 * (10**8 + 10**7) / 1e11

    assert sampling_seconds(step, speeds) == 0
    assert sampling_seconds(with_sampling(step, sampled), speeds) == pytest.approx(prompts + tokens)
    assert sampling_seconds(with_sampling(step, sampled), slow_host) == launches
    both = step_seconds(with_sampling(step, sampled), speeds) - step_seconds(step, speeds)
    assert both == pytest.approx(prompts + tokens)
