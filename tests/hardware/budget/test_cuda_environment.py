"""A one-pool board gets its cap before CUDA starts, and the user's own settings stay."""

import pytest

from lightning_unified.errors import BudgetError
from lightning_unified.hardware import Budget, cap_allocator, lint_environment, prepare_allocators
from lightning_unified.hardware.environment.cuda import WRITTEN_CUDA, is_one_pool_board, set_cuda_environment

GIB = 2**30
CUDA, ANY = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
KEY = "per_process_memory_fraction"


def board(machine, name="gb10", **environ):
    return machine(name, environ=dict(environ))


def share(sources, variable=CUDA):
    return float(sources.environ[variable].rpartition(f"{KEY}:")[2])


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("gb10", True), ("jetson", True), ("rtx4090", False), ("gh200", False), ("strix_halo", False), ("m2", False)],
)
def test_a_board_is_told_by_what_the_system_says_without_starting_cuda(machine, name, is_one):
    sources = machine(name)
    sources.torch.cuda.get_device_properties = None

    assert is_one_pool_board(sources) == is_one


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("60GiB", 60 / 119.7), ("50%", 0.5), ("leave 20GiB", 95.7 / 119.7), ("auto", (115.7 - 11.97) / 119.7)],
)
def test_the_share_of_each_budget_is_written_before_cuda_is_up(machine, spec, expected):
    sources = board(machine)
    cap = set_cuda_environment(spec, sources=sources)

    assert cap.applied
    assert share(sources) == pytest.approx(expected, abs=1e-3)
    assert {finding.verdict for finding in lint_environment(sources.environ, allocator_initialized=False)} == {"ok"}


def test_other_settings_of_the_user_stay_beside_it(machine):
    sources = board(machine, **{CUDA: "expandable_segments:True,max_split_size_mb:128"})
    set_cuda_environment("50%", sources=sources)

    assert sources.environ[CUDA] == f"expandable_segments:True,max_split_size_mb:128,{KEY}:0.5000"


def test_it_goes_into_the_variable_that_the_user_chose(machine):
    """torch reads the first of the two that is set, so that a second one would hide the user's."""
    sources = board(machine, **{ANY: "expandable_segments:True"})
    set_cuda_environment("50%", sources=sources)

    assert sources.environ[ANY] == f"expandable_segments:True,{KEY}:0.5000"
    assert CUDA not in sources.environ


def test_the_users_own_share_stays_and_is_reported(machine):
    sources = board(machine, **{CUDA: f"{KEY}:0.3"})
    cap = set_cuda_environment("50%", sources=sources)

    assert (cap.applied, sources.environ) == (False, {CUDA: f"{KEY}:0.3"})
    assert cap.reason == f"your own {KEY} in {CUDA} stays"


def test_what_was_written_before_is_replaced(machine):
    sources = board(machine)
    for spec in ("50%", "40%"):
        set_cuda_environment(spec, sources=sources)

    assert sources.environ == {CUDA: f"{KEY}:0.4000", WRITTEN_CUDA: f"{KEY}:0.4000"}


def test_once_cuda_is_up_nothing_is_written(machine, recorder):
    sources, recorder.cuda_is_up = board(machine), True
    cap = set_cuda_environment("50%", sources=sources)

    assert (cap.applied, sources.environ) == (False, {})
    assert "too late" in cap.reason


def test_a_torch_that_does_not_know_the_setting_is_not_given_it(machine):
    sources = board(machine)
    sources.torch.__version__ = "2.12.1"

    assert "from 2.13 on" in set_cuda_environment("50%", sources=sources).reason
    assert sources.environ == {}


@pytest.mark.parametrize("name", ["rtx4090", "strix_halo", "gh200", "bare", "m4_pro"])
def test_other_machines_are_left_alone(machine, name):
    sources = board(machine, name)

    assert not set_cuda_environment("4GiB", sources=sources).applied
    assert sources.environ == {}


def test_a_budget_that_cannot_be_read_is_refused_before_anything_is_written(machine):
    sources = board(machine)
    with pytest.raises(BudgetError, match="cannot be read"):
        set_cuda_environment("lots", sources=sources)

    assert sources.environ == {}


def test_the_exact_cap_replaces_the_share_that_was_written(machine, recorder):
    """What torch made of the variable is this package's own doing, not a cap of the user's."""
    sources = board(machine)
    set_cuda_environment("leave 60GiB", sources=sources)
    recorder.stands = share(sources)
    budget = Budget(bytes=90 * GIB, spec="leave 60GiB", reason="", follows_others=True)
    cap = cap_allocator("cuda:0", budget, sources=sources)

    assert cap.applied
    assert recorder.stands == pytest.approx(90 / 119.7)


@pytest.mark.parametrize(("name", "word"), [("gb10", KEY), ("m2", "HIGH_WATERMARK"), ("bare", "no MPS here")])
def test_one_call_prepares_whatever_is_here(machine, name, word):
    sources = board(machine, name)

    assert word in prepare_allocators("3GiB", sources=sources).reason
