"""The optimizer's kernel as a memory option, without a Trainer.

Training is the same to rounding, and everything is undone.
"""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from lightning_unified.errors import ConfigurationError
from lightning_unified.options import AppliedOptions, MemoryOptions, allowed_kernels, kernel_of, set_kernel

FUSED = {"Adam": Adam, "AdamW": AdamW, "SGD": lambda p, **k: SGD(p, 0.1, momentum=0.9, **k), "Adagrad": Adagrad}


def deep():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def stepped(module, optimizer, steps=3):
    for _ in range(steps):
        torch.manual_seed(1)
        module.zero_grad()
        module(torch.randn(3, 6, dtype=module[0].weight.dtype)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


def flags(optimizer):
    return [{key: group.get(key) for key in ("foreach", "fused")} for group in optimizer.param_groups]


def assert_close(one, other):
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("kernel", ["fused", "foreach", "for-loop"])
def test_another_kernel_learns_the_same_to_rounding(kind, kernel):
    plain = stepped(plain_module := deep(), FUSED[kind](plain_module.parameters()))
    module = deep()
    optimizer = FUSED[kind](module.parameters())
    set_kernel(optimizer, kernel)

    assert_close(plain, stepped(module, optimizer))
    assert kernel_of(optimizer) == kernel


def test_kernels_change_between_steps_and_back():
    plain = stepped(plain_module := deep(), AdamW(plain_module.parameters()), steps=4)
    module = deep()
    optimizer = AdamW(module.parameters())
    for kernel in ("for-loop", "fused", "foreach", "fused"):
        change = set_kernel(optimizer, kernel)
        stepped(module, optimizer, steps=1)
        change.undo()

    assert_close(plain, list(module.parameters()))
    assert all(state["step"] == 4 for state in optimizer.state.values())


def test_step_counters_are_what_each_kernel_wants_of_them():
    module = deep().double()
    optimizer = Adam(module.parameters())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        stepped(module, optimizer, steps=1)
        change = set_kernel(optimizer, "fused")
        assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float32}
        stepped(module, optimizer, steps=1)
        change.undo()
        assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float64}
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}], ids=str)
def test_an_optimizer_is_as_it_was_built_once_it_is_undone(options):
    optimizer = AdamW(deep().parameters(), **options)
    before, attributes = (flags(optimizer), dict(optimizer.defaults)), set(vars(optimizer))
    change = set_kernel(optimizer, "foreach")
    change.undo()
    change.undo()

    assert (flags(optimizer), optimizer.defaults) == before
    assert set(vars(optimizer)) == attributes
    assert not optimizer._optimizer_state_dict_post_hooks and not optimizer._optimizer_load_state_dict_post_hooks


def test_a_gradient_scaler_is_informed_whether_the_optimizer_unscales():
    optimizer = AdamW(deep().parameters())
    change = set_kernel(optimizer, "fused")
    assert optimizer._step_supports_amp_scaling
    change.undo()
    assert not hasattr(optimizer, "_step_supports_amp_scaling")

    fused = AdamW(deep().parameters(), fused=True)
    set_kernel(fused, "for-loop")
    assert not hasattr(fused, "_step_supports_amp_scaling")


def test_a_checkpoint_knows_nothing_of_it_and_one_that_is_loaded_runs_with_it():
    module = deep()
    optimizer = AdamW(module.parameters())
    set_kernel(optimizer, "fused")
    stepped(module, optimizer, steps=1)
    saved = copy.deepcopy(optimizer.state_dict())

    assert {group["fused"] for group in saved["param_groups"]} == {None}
    assert {group["fused"] for group in optimizer.param_groups} == {True}
    other = AdamW(deep().parameters())
    change = set_kernel(other, "foreach")
    other.load_state_dict(saved)
    assert kernel_of(other) == "foreach"
    change.undo()
    assert flags(other) == [{"foreach": None, "fused": None}]


def test_a_copy_of_an_optimizer_steps_with_the_same_kernel():
    module = deep()
    optimizer = AdamW(module.parameters())
    set_kernel(optimizer, "fused")
    twin_module, twin = copy.deepcopy((module, optimizer))

    assert kernel_of(twin) == "fused"
    assert all(torch.equal(a, b) for a, b in zip(stepped(module, optimizer), stepped(twin_module, twin), strict=True))


def test_a_changed_optimizer_goes_when_its_last_user_does():
    gc.disable()
    try:
        optimizer = AdamW(deep().parameters())
        set_kernel(optimizer, "fused")
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kernel", ["fused", "foreach", "for-loop"])
def test_a_dry_run_under_fake_tensors_runs_with_it(kernel):
    with FakeTensorMode():
        module = deep()
        optimizer = AdamW(module.parameters())
        set_kernel(optimizer, kernel)
        stepped(module, optimizer, steps=2)

    assert kernel_of(optimizer) == kernel
    assert len(optimizer.state) == 8


def test_which_kernel_runs_is_torchs_own_choice_by_device_where_nobody_chose():
    optimizer = AdamW(deep().parameters())

    assert (kernel_of(optimizer), kernel_of(optimizer, device="mps"), kernel_of(optimizer, device="cuda")) == (
        "for-loop",
        "for-loop",
        "foreach",
    )
    assert kernel_of(AdamW(deep().parameters(), fused=False), device="cuda") == "for-loop"


@pytest.mark.parametrize(
    ("optimizer", "device", "allowed"),
    [
        (AdamW, "cpu", ["fused", "for-loop", "foreach"]),
        (AdamW, "cuda", ["fused", "for-loop", "foreach"]),
        (AdamW, "mps", ["fused", "for-loop"]),
        (Adagrad, "cuda", ["for-loop", "foreach"]),
        (RMSprop, "cuda", ["for-loop", "foreach"]),
        (lambda p: AdamW(p, differentiable=True), "cuda", ["for-loop"]),
        (lambda p: AdamW(p, lr=torch.tensor(0.1)), "cuda", ["fused", "for-loop"]),
        (torch.optim.LBFGS, "cuda", []),
        (type("Mine", (AdamW,), {}), "cuda", []),
    ],
    ids=["AdamW cpu", "AdamW", "AdamW mps", "Adagrad", "RMSprop", "differentiable", "tensor lr", "LBFGS", "derived"],
)
def test_what_an_optimizer_allows(optimizer, device, allowed):
    assert allowed_kernels(optimizer(deep().parameters()), device) == allowed


def test_under_a_scaler_fused_is_not_offered():
    assert allowed_kernels(AdamW(deep().parameters()), "cuda", scaled=True) == ["for-loop", "foreach"]


def test_a_kernel_that_is_not_allowed_is_refused_with_those_that_are():
    with pytest.raises(
        ConfigurationError, match=r'="fused": RMSprop on cpu cannot .*; it can run with for-loop, foreach\.'
    ):
        set_kernel(RMSprop(deep().parameters()), "fused")
    with pytest.raises(ConfigurationError, match=r"LBFGS on cpu cannot .*; only torch's own optimizers can be changed"):
        set_kernel(torch.optim.LBFGS(deep().parameters()), "fused")


def test_a_plan_chooses_for_optimizers_built_without_a_choice_only():
    module = deep()
    free, chosen = AdamW(module[0].parameters()), AdamW(module[1].parameters(), foreach=False)
    memory_options = AppliedOptions(optimizer_kernel="auto")
    memory_options.begin(module, [free, chosen])
    memory_options.set_kernel("foreach", why="as planned")
    memory_options.set_kernel("fused", why="as planned")

    assert memory_options.kernel_choices("mps") == ("fused", "for-loop")
    assert (kernel_of(free), kernel_of(chosen), memory_options.optimizer_kernel) == ("fused", "for-loop", "other")
    assert memory_options.reasons == {"optimizer_kernel": "fused, as planned"}
    memory_options.end()
    assert flags(free) == [{"foreach": None, "fused": None}]


@pytest.mark.parametrize("asked", ["keep", "foreach"])
def test_a_plan_has_no_kernel_to_choose_unless_that_was_left_to_it(asked):
    memory_options = AppliedOptions(optimizer_kernel=asked)
    memory_options.begin(deep(), [AdamW(deep().parameters())])

    assert memory_options.kernel_choices() == ()
    with pytest.raises(ConfigurationError, match=rf'optimizer_kernel="{asked}" leaves nothing to choose; "auto" does'):
        memory_options.set_kernel("fused", why="as planned")


def test_sparse_gradients_forbid_a_fused_kernel():
    module = deep()
    module.table = nn.Embedding(4, 6, sparse=True)
    memory_options = AppliedOptions(optimizer_kernel="auto")
    memory_options.begin(module, [SGD(module.parameters(), 0.1)])

    assert memory_options.kernel_choices() == ("foreach", "for-loop")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            "fuse",
            r"optimizer_kernel='fuse' is not offered; did you mean fused\? choose from keep, auto, fused, foreach, for-loop",
        ),
        ("forloop", r"did you mean for-loop\?"),
        ("in-backward", r"not offered: it writes weights while gradients are still being made"),
        ("8-bit", r"not offered: it is another optimizer .* return one from configure_optimizers"),
    ],
)
def test_what_is_no_kernel_is_refused_with_the_reason(asked, message):
    with pytest.raises(ConfigurationError, match=message):
        MemoryOptions(optimizer_kernel=asked)
