"""Compilation as an option: when it pays, what it compiles, that nothing of it stays."""

import copy
import pickle
from unittest import mock

import lightning as L
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.compiled import compiled_parts, is_compiled, parts_with_graphs
from lightning_unified.nn.recomputing import Recomputing, is_recomputed
from lightning_unified.options import Compilation, CompileCost, MemoryOptions, compile_pays, recompute_policies
from tests.support.lanes import first_cells


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x, scale=None):
        return x + self.linear(self.norm(x)).relu() * (1 if scale is None else scale)


class Deep(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, scale=x[:, :1])
        return x


@pytest.fixture
def counter():
    """Let `torch.compile` count graphs instead of generating code."""
    torch.compiler.reset()
    graphs = CompileCounter()
    with mock.patch("lightning_unified.options.compilation.Compiler", return_value=graphs):
        yield graphs
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("cost", "pays", "why"),
    [
        (CompileCost(device="cuda", step_seconds=0.5, steps=10_000), True, "pays: 10000 steps would save about 750 s"),
        (CompileCost(device="cuda", step_seconds=0.5, steps=100), False, "does not pay"),
        (CompileCost(device="cuda", step_seconds=0.5, steps=None), True, "no last step"),
        (CompileCost(device="cuda", step_seconds=None, steps=10_000), False, "the time of a step is unknown"),
        (CompileCost(device="cpu", step_seconds=9.0, steps=10_000), False, "no gain from compilation is known on cpu"),
        (CompileCost(device="mps", step_seconds=9.0, steps=None), False, "no gain from compilation is known on mps"),
    ],
)
def test_compilation_pays_in_long_runs_on_devices_with_a_known_gain(cost, pays, why):
    found, reason = compile_pays(cost)

    assert found is pays
    assert why in reason


def test_one_graph_serves_all_blocks_and_all_numbers_of_rows_but_one(counter):
    module, compilation = Deep(), Compilation("blocks")
    compilation.begin(module)
    for rows in (8, 5, 3, 2, 7):
        module(torch.randn(rows, 6, requires_grad=True)).sum().backward()
    assert counter.frame_count == 1

    module(torch.randn(1, 6, requires_grad=True)).sum().backward()
    assert counter.frame_count == 2
    with torch.no_grad():
        module(torch.randn(4, 6))
    assert counter.frame_count == 2, "an evaluation runs uncompiled"


@pytest.mark.slow
def test_torchs_own_layers_are_compiled_too(counter):
    module, compilation = Deep(), Compilation("blocks")
    module.layers = nn.ModuleList(nn.TransformerEncoderLayer(6, 2, 12) for _ in range(3))
    compilation.begin(module)
    hidden = torch.randn(4, 5, 6, requires_grad=True)
    for layer in module.layers:
        hidden = layer(hidden)
    assert counter.frame_count == 1 and counter.op_count > 5


def test_checkpointing_wraps_the_compiled_block(counter):
    plain, module, compilation = Deep(), Deep(), Compilation("blocks")
    compilation.begin(module)
    with Recomputing(module.layers):
        assert all(map(is_recomputed, module.layers))
        for rows in (6, 4):
            x = torch.randn(rows, 6, requires_grad=True)
            for one in (plain, module):
                one(x).square().sum().backward()
    pairs = zip(plain.parameters(), module.parameters(), strict=True)
    assert all(torch.allclose(one.grad, other.grad, atol=1e-6) for one, other in pairs)
    assert counter.frame_count == 1
    assert all(map(is_compiled, module.layers)) and not any(map(is_recomputed, module.layers))


@first_cells(1, "what", ["blocks", "whole"])
def test_the_module_leaves_as_it_came(counter, what):
    module, compilation = Deep(), Compilation(what)
    names, attributes = list(module.state_dict()), [dict(vars(one)) for one in module.modules()]
    compilation.begin(module)
    module(torch.randn(3, 6)).sum().backward()

    assert compiled_parts(module)
    assert list(module.state_dict()) == names
    assert not compiled_parts(copy.deepcopy(module))
    assert not compiled_parts(pickle.loads(pickle.dumps(module)))
    compilation.end()
    assert [dict(vars(one)) for one in module.modules()] == attributes


@pytest.mark.slow
def test_compiled_blocks_keep_no_attention_outputs():
    module = Deep()
    assert any(policy.keep_attention for policy in recompute_policies(module))
    for layer in module.layers:
        layer.compile()
    assert not any(policy.keep_attention for policy in recompute_policies(module))


@pytest.mark.parametrize(
    ("begin", "text"),
    [
        (lambda: Compilation("blocks").begin(Deep(), obstacle="triton is missing"), "triton is missing; set compile=False"),
        (lambda: Compilation("blocks").begin(nn.Linear(2, 2)), "no ModuleList or Sequential"),
        (lambda: Compilation("whole").begin(nn.Linear(2, 2)), "no child modules"),
        (lambda: Compilation("whole").begin(nn.Sequential(torch.compile(nn.Linear(2, 2)))), "holds compiled modules already"),
        (lambda: MemoryOptions(compile=True), 'compile=True: give "auto", "blocks"'),
        (lambda: MemoryOptions(compile="all"), "compile='all': give"),
        (lambda: MemoryOptions(compile=0), "compile=0: give"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_by_name(begin, text):
    with pytest.raises(ConfigurationError, match=text.replace("(", r"\(")):
        begin()


@pytest.mark.parametrize(
    ("given", "why"),
    [({"obstacle": "g++ is missing"}, "g++ is missing"), ({"ranks": 2}, "this run has 2")],
)
def test_auto_says_why_it_compiles_nothing(given, why):
    compilation = Compilation("auto")
    compilation.begin(Deep(), **given)

    assert not compilation.is_open
    assert why in compilation.reason


def test_auto_compiles_once_it_knows_that_it_pays(counter):
    module, compilation = Deep(), Compilation("auto")
    compilation.begin(module)
    assert compilation.is_open and not compiled_parts(module)
    assert compilation.decide(CompileCost(device="cuda", step_seconds=1.0, steps=None))
    assert len(compiled_parts(module)) == 3
    assert "no last step: 3 blocks of layers (Block), detected" in compilation.reason
    compilation.end()
    assert not compiled_parts(module)


def test_parts_with_recurrent_layers_run_as_no_graph_unless_the_compiler_takes_them():
    module = nn.ModuleDict({"recurrent": nn.ModuleList([nn.GRU(4, 4)]), "plain": nn.ModuleList([nn.Linear(4, 4)])})
    for part in module.values():
        part._compiled_call_impl = part._call_impl

    assert list(parts_with_graphs(module)) == ["plain"]
    with torch._dynamo.config.patch(allow_rnn=True):
        assert list(parts_with_graphs(module)) == ["recurrent", "plain"]
