"""What a plan can pull, on modules and optimizers without a Trainer: the same learning, and everything undone."""

import copy
import gc
import weakref

import lightning as L
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from lightning_unified.errors import ConfigurationError
from lightning_unified.models.gearhead import GearHead
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.planning import static_bytes
from lightning_unified.training.levers import (
    Levers,
    LossChunk,
    RecomputedBlocks,
    allowed_kernels,
    kernel_of,
    recompute_policies,
    set_kernel,
)
from lightning_unified.training.recomputation import Recomputation

FUSED = {"Adam": Adam, "AdamW": AdamW, "SGD": lambda p, **k: SGD(p, 0.1, momentum=0.9, **k), "Adagrad": Adagrad}
ALL, NONE = RecomputePolicy(blocks="all"), RecomputePolicy(blocks=0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.4)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return x + self.drop(self.linear(x)).relu()


class Deep(L.LightningModule):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def training_step(self, batch, batch_idx=0):
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()


class Switch(Deep):
    recompute = False


class Both(Switch):
    def recompute_blocks(self):
        return list(self.layers)


def deep(kind=Deep):
    torch.manual_seed(0)
    return kind()


def gradients(module):
    torch.manual_seed(1)
    module.zero_grad()
    module.training_step(torch.randn(3, 6)).backward()
    return [parameter.grad for parameter in module.parameters()]


def stood_in(module):
    return ["forward" in vars(layer) for layer in module.layers]


def stepped(module, optimizer, steps=3):
    for _ in range(steps):
        gradients(module)
        optimizer.step()
    return [parameter.detach().clone() for parameter in module.parameters()]


def flags(optimizer):
    return [{key: group.get(key) for key in ("foreach", "fused")} for group in optimizer.param_groups]


def assert_close(one, other):
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("policy", "runs"),
    [
        (NONE, [1, 1, 1, 1]),
        (RecomputePolicy(blocks=1), [2, 1, 1, 1]),
        (RecomputePolicy(blocks=3, keep_attention=True), [2, 2, 2, 1]),
        (ALL, [2, 2, 2, 2]),
    ],
    ids=str,
)
def test_the_first_blocks_run_twice_and_gradients_are_equal_bit_for_bit(policy, runs):
    module = deep()
    lever = RecomputedBlocks(module, policy)
    again = gradients(module)
    lever.undo()
    lever.undo()

    assert [layer.runs for layer in module.layers] == runs
    assert all(torch.equal(a, b) for a, b in zip(gradients(deep()), again, strict=True))
    assert stood_in(module) == [False] * 4


def test_a_copy_of_a_module_with_a_lever_pulled_has_none():
    module = deep()
    RecomputedBlocks(module, ALL)
    twin = copy.deepcopy(module)
    gradients(twin)

    assert [layer.runs for layer in twin.layers] == [1] * 4


def test_more_blocks_than_there_are_is_all():
    lever = RecomputedBlocks(deep(), RecomputePolicy(blocks=9))

    assert (lever.policy, lever.how) == (ALL, "4 blocks of layers (Block), detected")


def test_some_blocks_are_told_as_some():
    assert RecomputedBlocks(deep(), RecomputePolicy(blocks=2, keep_attention=True)).how == (
        "the first 2 of 4 blocks of layers (Block), detected, attention kept"
    )


def test_a_switch_means_all_or_none_and_is_put_back():
    module = deep(Switch)
    lever = RecomputedBlocks(module, ALL)
    assert module.recompute is True
    lever.undo()

    assert module.recompute is False
    assert recompute_policies(module) == (NONE, ALL)
    with pytest.raises(ConfigurationError, match=r"Switch recomputes by its own `recompute`, .* not 2 blocks\. "):
        RecomputedBlocks(module, RecomputePolicy(blocks=2))


def test_a_module_with_a_switch_that_names_its_blocks_can_recompute_some():
    module = deep(Both)
    module.recompute = True
    lever = RecomputedBlocks(module, RecomputePolicy(blocks=2))
    assert (module.recompute, stood_in(module)) == (False, [True, True, False, False])
    lever.undo()

    assert (module.recompute, stood_in(module)) == (True, [False] * 4)


def test_policies_go_from_none_to_all_with_and_without_attention():
    assert [str(policy) for policy in recompute_policies(deep())] == [
        "none",
        "1 of 4 blocks, attention kept",
        "1 of 4 blocks",
        "2 of 4 blocks, attention kept",
        "2 of 4 blocks",
        "3 of 4 blocks, attention kept",
        "3 of 4 blocks",
        "all blocks, attention kept",
        "all blocks",
    ]


def test_a_module_without_blocks_offers_none():
    assert recompute_policies(L.LightningModule()) == (NONE,)


def test_gearhead_can_recompute_some_of_its_blocks():
    assert len(recompute_policies(GearHead(layers=3, width=32, heads=2, feed_forward=32, vocabulary=64))) == 7


def test_recomputation_goes_from_some_blocks_to_all_and_ends_as_it_began():
    module, recomputation = deep(), Recomputation("auto")
    recomputation.begin(module)
    assert recomputation.on is None
    recomputation.set(RecomputePolicy(blocks=2), why="as planned")
    assert (stood_in(module), recomputation.on, recomputation.everything) == ([True, True, False, False], True, False)
    assert recomputation.reason == "as planned: the first 2 of 4 blocks of layers (Block), detected"

    assert recomputation.more("because memory ran out")
    assert (stood_in(module), recomputation.everything) == ([True] * 4, True)
    assert recomputation.reason == "because memory ran out: 4 blocks of layers (Block), detected"
    assert not recomputation.more("again")

    gradients(module)
    assert [layer.runs for layer in module.layers] == [2] * 4
    recomputation.end()
    assert stood_in(module) == [False] * 4


def test_kept_attention_is_given_up_for_want_of_memory():
    recomputation = Recomputation("auto")
    recomputation.begin(deep())
    recomputation.set(RecomputePolicy(blocks="all", keep_attention=True), why="as planned")

    assert recomputation.more("because memory ran out")
    assert recomputation.policy == ALL


@pytest.mark.parametrize(("asked", "given"), [(True, NONE), (False, ALL), (False, RecomputePolicy(blocks=2))])
def test_what_was_asked_for_is_not_planned_otherwise(asked, given):
    recomputation = Recomputation(asked)
    recomputation.begin(deep())

    with pytest.raises(
        ConfigurationError, match=rf"recompute={given} for Deep: it can be {'all blocks' if asked else 'none'}\."
    ):
        recomputation.set(given, why="as planned")


def test_a_switch_that_the_user_turned_on_stays_on():
    module, recomputation = deep(Both), Recomputation("auto")
    module.recompute = True
    recomputation.begin(module)

    assert recomputation.choices() == (ALL,)


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


def test_a_gradient_scaler_is_told_whether_the_optimizer_unscales():
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
def test_a_rehearsal_under_fake_tensors_runs_with_it(kernel):
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
    with pytest.raises(ConfigurationError, match=r"LBFGS on cpu cannot .*; only torch's own optimizers can be told"):
        set_kernel(torch.optim.LBFGS(deep().parameters()), "fused")


def test_a_plan_chooses_for_optimizers_built_without_a_choice_only():
    module = deep()
    free, chosen = AdamW(module.layers[0].parameters()), AdamW(module.layers[1].parameters(), foreach=False)
    levers = Levers(optimizer_kernel="auto")
    levers.begin(module, [free, chosen])
    levers.set_kernel("foreach", why="as planned")
    levers.set_kernel("fused", why="as planned")

    assert levers.kernel_choices("mps") == ("fused", "for-loop")
    assert (kernel_of(free), kernel_of(chosen), levers.optimizer_kernel) == ("fused", "for-loop", "other")
    assert levers.reasons == {"optimizer_kernel": "fused, as planned"}
    levers.end()
    assert flags(free) == [{"foreach": None, "fused": None}]


@pytest.mark.parametrize("asked", ["keep", "foreach"])
def test_a_plan_has_no_kernel_to_choose_unless_that_was_left_to_it(asked):
    levers = Levers(optimizer_kernel=asked)
    levers.begin(deep(), [AdamW(deep().parameters())])

    assert levers.kernel_choices() == ()
    with pytest.raises(ConfigurationError, match=rf'optimizer_kernel="{asked}" leaves nothing to choose; "auto" does'):
        levers.set_kernel("fused", why="as planned")


def test_sparse_gradients_forbid_a_fused_kernel():
    module = deep()
    module.table = nn.Embedding(4, 6, sparse=True)
    levers = Levers(optimizer_kernel="auto")
    levers.begin(module, [SGD(module.parameters(), 0.1)])

    assert levers.kernel_choices() == ("foreach", "for-loop")


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
        Levers(optimizer_kernel=asked)


class Chunked(Deep):
    loss_chunk_rows = None


def test_a_chunk_is_set_and_undone():
    module = Chunked()
    levers = Levers()
    levers.begin(module, [])
    levers.set_loss_chunk(1024, why="as planned")
    assert (module.loss_chunk_rows, levers.loss_chunk) == (1024, 1024)
    levers.set_loss_chunk(128, why="as planned")
    assert levers.reasons == {"loss_chunk": "128 rows, as planned"}
    levers.end()

    assert module.loss_chunk_rows is None and "loss_chunk_rows" not in vars(module)
    assert levers.reasons == {}


def test_a_chunk_that_the_user_set_is_kept_and_alone_to_choose():
    module = Chunked()
    module.loss_chunk_rows = 64
    levers = Levers()
    levers.begin(module, [])
    assert levers.chunk_choices() == (64,)
    LossChunk(module, 8).undo()

    assert module.loss_chunk_rows == 64


def test_a_module_without_chunks_offers_none_and_is_refused_one():
    levers = Levers()
    levers.begin(deep(), [])

    assert levers.chunk_choices() == (None,)
    with pytest.raises(ConfigurationError, match=r"loss_chunk=8: Deep has no attribute loss_chunk_rows"):
        LossChunk(deep(), 8)
    with pytest.raises(ConfigurationError, match=r"loss_chunk=0: give a count of rows, 1 or more, or None"):
        LossChunk(Chunked(), 0)


def test_gearheads_loss_is_the_same_in_any_chunk():
    torch.manual_seed(0)
    module = GearHead(layers=1, width=32, heads=2, feed_forward=32, vocabulary=64, dropout=0.0)
    ids = torch.randint(9, 64, (2, 16))

    def outcome(rows):
        module.zero_grad()
        lever = LossChunk(module, rows)
        loss = module.training_step({"input_ids": ids, "labels": ids})
        loss.backward()
        lever.undo()
        return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]

    assert_close(outcome(None), outcome(3))


class Codes(torch.Tensor):
    """8-bit codes and a scale that show themselves as a float32 tensor, as torchao's optimizer states do."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, *_):
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def test_states_of_8_bits_count_as_what_they_keep_and_an_unknown_optimizer_nothing_before_its_first_step():
    class Other(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

    layer = nn.Linear(64, 64, bias=False)
    optimizer = Other(layer.parameters())
    assert static_bytes(layer, [optimizer])["optimizer state"] == 0
    assert kernel_of(optimizer) == "other"

    optimizer.state[layer.weight]["moment"] = Codes(torch.zeros(64, 64, dtype=torch.uint8), torch.zeros(16))
    assert static_bytes(layer, [optimizer])["optimizer state"] == 64 * 64 + 16 * 4


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda p: RMSprop(p), 1),
        (lambda p: RMSprop(p, momentum=0.9, centered=True), 3),
        (torch.optim.Adadelta, 2),
        (lambda p: Adam(p, amsgrad=True), 3),
    ],
    ids=["RMSprop", "RMSprop with all", "Adadelta", "amsgrad"],
)
def test_state_counted_before_the_first_step_is_what_the_first_step_makes(make, states):
    module = nn.Linear(64, 64, bias=False)
    optimizer = make(module.parameters())
    counted = static_bytes(module, [optimizer])["optimizer state"]
    module(torch.randn(2, 64)).sum().backward()
    optimizer.step()

    assert counted == states * 64 * 64 * 4
    assert static_bytes(module, [optimizer])["optimizer state"] == counted + 4
