"""Compiled blocks that keep a share of their activations: equal gradients, less memory."""

import copy
from unittest import mock

import lightning as L
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.options import CheckpointedBlocks, Compilation, recompute_policies
from lightning_unified.planner.dry_run import DryRun, StepSpec
from lightning_unified.planner.search.combinations import combinations_to_compare
from tests.support.lanes import first_cells

WIDTH = 16


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(functional.leaky_relu(self.up(x))))


class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        query, key, value = self.inputs(x).unflatten(-1, (3, 1, WIDTH)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout.p, is_causal=True)
        return x + self.dropout(self.outputs(mixed.transpose(1, 2).flatten(2)))


class Net(L.LightningModule):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def compiled():
    torch.compiler.reset()
    compilation = Compilation("blocks")
    yield compilation
    compilation.end()
    torch.compiler.reset()


def trained(module, x):
    """Return the gradients of a step, and the bytes that its forward pass saves beside the weights."""
    own, saved = {one.untyped_storage().data_ptr() for one in module.parameters()}, {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = module(x).square().mean()
    gradients = torch.autograd.grad(loss, [*module.parameters()])
    return gradients, sum(storage.nbytes() for storage in saved.values())


def kept(share):
    return RecomputePolicy(blocks="all", kept=share)


def test_blocks_that_keep_less_have_equal_gradients(compiled):
    module, x = Net(), torch.randn(6, WIDTH)
    plain, _ = trained(module, x)
    compiled.begin(module)
    _, before = trained(module, x)
    blocks = CheckpointedBlocks(module, kept(0.0))
    gradients, during = trained(module, x)
    blocks.undo()

    torch.testing.assert_close(gradients, plain)
    assert during < 0.6 * before
    assert trained(module, x)[1] == before


def test_the_last_blocks_may_keep_more_than_the_others(compiled):
    module, x = Net(), torch.randn(6, WIDTH)
    plain, _ = trained(module, x)
    compiled.begin(module)
    saved = []
    for last in ({}, {"last": 1, "kept_last": 1.0}, {"last": 2, "kept_last": 1.0}):
        blocks = CheckpointedBlocks(module, RecomputePolicy(blocks="all", kept=0.0, **last))
        gradients, bytes_saved = trained(module, x)
        blocks.undo()
        torch.testing.assert_close(gradients, plain)
        saved.append(bytes_saved)

    assert saved[1] - saved[0] == saved[2] - saved[1] > 0


def test_dropout_that_runs_again_drops_the_same_entries(compiled):
    module = Net(dropout=0.5)
    compiled.begin(module)
    CheckpointedBlocks(module, kept(0.0))
    x = torch.randn(64, WIDTH, requires_grad=True)
    total = module(x).sum()
    (gradient,) = torch.autograd.grad(total, x)

    torch.testing.assert_close((gradient * x).sum(), total)  # Euler: the network is homogeneous for fixed entries


class AttentionNet(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attention(0.0) for _ in range(2))

    def training_step(self, batch, batch_idx):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def attention_in_step(module, x):
    """Return how often a step runs attention forward, for each block."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(x).square().mean().backward()
    names = [event.name for event in profile.events()]
    return sum(name == "aten::_scaled_dot_product_flash_attention_for_cpu" for name in names) / len(module.blocks)


@first_cells(1, ("share", "times"), [(0.1, 1), (0.0, 2)])
def test_attention_runs_again_only_where_nothing_is_kept(compiled, share, times):
    module = AttentionNet()
    compiled.begin(module)
    blocks = CheckpointedBlocks(module, kept(share))
    for rows in (4, 6):  # graphs of a variable number of rows
        attention_in_step(module, torch.randn(rows, 32, WIDTH))
    counted = attention_in_step(module, torch.randn(5, 32, WIDTH))
    blocks.undo()
    trace = DryRun(StepSpec(module=module, batch=torch.randn(5, 32, WIDTH)), recompute=kept(share)).run(5)
    planned = [event for event in trace.events if "attention" in getattr(event, "op", "")]

    assert counted == times
    assert len([one for one in planned if "backward" not in one.op]) == times * len(module.blocks)


@pytest.mark.gpu
def test_attention_that_runs_again_drops_the_same_probabilities(compiled):
    class Attends(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Attention(0.3) for _ in range(2))

    module, x = Attends().cuda(), torch.randn(4, 32, WIDTH, device="cuda")
    compiled.begin(module)
    found = []
    for policy in (None, kept(0.2), kept(0.0)):
        blocks = None if policy is None else CheckpointedBlocks(module, policy)
        torch.manual_seed(1)
        with torch.autocast("cuda", torch.bfloat16):
            loss = module(x).square().mean()
        found.append(torch.autograd.grad(loss, [*module.parameters()]))
        if blocks is not None:
            blocks.undo()

    for gradients in found[1:]:
        torch.testing.assert_close(gradients, found[0], rtol=0.02, atol=2e-4)


class Written(nn.Module):
    """Its forward writes buffers that it has read."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        hidden = functional.gelu(self.norm(self.up(x)) * self.scale.clone()) * (1 + self.count.clone())
        with torch.no_grad():
            self.scale.mul_(0.5)
            self.count.add_(1.0)
        return x + hidden * hidden.sigmoid()


@first_cells(1, "policy", [None, kept(0.3), kept(0.0)], ids=str)
def test_gradients_see_buffers_as_they_were_read(compiled, policy):
    module, x = Net(), torch.randn(12, WIDTH)
    module.blocks = nn.ModuleList(Written() for _ in range(2))
    plain = copy.deepcopy(module)
    compiled.begin(module)
    if policy is not None:
        CheckpointedBlocks(module, policy)

    for _ in range(3):
        torch.testing.assert_close(trained(module, x)[0], trained(plain, x)[0])
    torch.testing.assert_close([*module.buffers()], [*plain.buffers()])


@pytest.mark.slow
@first_cells(1, "sequence", [False, True])
def test_passes_of_the_user_over_joint_graphs_still_run(compiled, sequence):
    seen, module = [], Net()
    compiled.begin(module)
    with torch._inductor.config.patch(joint_custom_post_pass=[seen.append] if sequence else seen.append):
        module(torch.randn(6, WIDTH)).sum().backward()

    assert seen and all(isinstance(graph, torch.fx.Graph) for graph in seen)


@pytest.mark.slow
def test_every_fit_and_share_compiles_graphs_of_its_own(compiled):
    graphs, x = CompileCounter(), torch.randn(6, WIDTH)
    with (
        torch._dynamo.config.patch(
            recompile_limit=2
        ),  # the first block's input needs no gradient, that of the others does
        mock.patch("lightning_unified.options.compilation.Compiler", return_value=graphs),
    ):
        for share in (0.5, 0.2, 0.0):
            module, compilation = Net(), Compilation("blocks")
            compilation.begin(module)
            module(x).sum().backward()
            CheckpointedBlocks(module, kept(share))
            module(x).sum().backward()
            compilation.end()

    assert graphs.frame_count == 2 * 2 * 3


def test_only_blocks_that_the_strategy_compiled_can_keep_a_share(compiled):
    by_user, by_strategy = Net(), Net()
    for block in by_user.blocks:
        block.compile()
    compiled.begin(by_strategy)

    assert all(policy.kept is None for policy in recompute_policies(by_user))
    assert [policy.kept for policy in recompute_policies(by_strategy)] == [None, 0.5, 0.35, 0.3, 0.2, 0.1, 0.0]
    with pytest.raises(ConfigurationError, match="are not compiled by the strategy"):
        CheckpointedBlocks(by_user, kept(0.5))


@pytest.mark.parametrize(
    "given", [{"blocks": 3, "kept": 0.5}, {"blocks": "all", "kept": 1.0}, {"blocks": "all", "kept": -0.1}]
)
def test_a_share_of_some_blocks_or_of_everything_is_refused(given):
    with pytest.raises(ValueError, match="give a share from 0 to less than 1"):
        RecomputePolicy(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"kept": 0.5, "last": 2, "kept_last": 0.5},
        {"kept": 0.5, "last": 0, "kept_last": 0.7},
        {"kept": 0.5, "last": 2},
        {"last": 2, "kept_last": 0.7},
    ],
)
def test_a_share_of_the_last_blocks_that_is_not_larger_is_refused(given):
    with pytest.raises(ValueError, match="give a number of blocks, and a share above"):
        RecomputePolicy(blocks="all", **given)


def test_a_search_compares_all_shares(compiled):
    module = Net()
    compiled.begin(module)
    policies = recompute_policies(module)
    found = combinations_to_compare("32-true", policies=policies, chunks=(None, 4096, 2048, 1024, 128))

    for chunk in (None, 4096, 2048, 1024):
        assert {one.recompute.kept for one in found if one.loss_chunk == chunk} == {one.kept for one in policies}
    assert [one.again for one in found if one.always][:2] == [0.0, pytest.approx(0.7)]
