"""A module's blocks: as declared, or from its lists of equal layers."""

import pytest
import torch
from torch import nn

from lightning_unified.nn.module_tree.blocks import find_blocks


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + self.norm(self.linear(x)).relu()


class Other(Block):
    pass


class Experts(nn.Module):
    """A layer with a list of its own inside."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


class Net(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def names(module):
    return list(find_blocks(module).modules)


def test_the_layers_of_a_transformer_are_found_and_described():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = Net(embed=nn.Embedding(50, 8), net=nn.TransformerEncoder(layer, 3), head=nn.Linear(8, 50))

    assert names(net) == ["net.layers.0", "net.layers.1", "net.layers.2"]
    assert str(find_blocks(net)) == "3 blocks of net.layers (TransformerEncoderLayer), detected"


def test_the_stages_of_a_residual_net_are_found_together():
    stages = {f"layer{index}": nn.Sequential(Block(), Block()) for index in range(1, 5)}
    net = Net(stem=nn.Conv2d(3, 8, 3), **stages, head=nn.Linear(8, 2))

    assert str(find_blocks(net)) == "8 blocks of layer1, layer2, layer3 and 1 more (Block), detected"


def test_encoder_and_decoder_are_both_found():
    net = Net(encoder=nn.ModuleList([Block(), Block()]), decoder=nn.ModuleList([Other(), Other()]))

    assert names(net) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_a_list_inside_a_block_is_left_to_the_block():
    assert names(Net(layers=nn.ModuleList([Experts(), Experts()]))) == ["layers.0", "layers.1"]


def test_a_list_inside_the_only_layer_is_found():
    assert names(Net(layers=nn.ModuleList([Experts()])))[0] == "layers.0.experts.0"


def test_lists_of_lists_are_looked_through():
    net = Net(layers=nn.ModuleList(nn.ModuleList([Block(), Other()]) for _ in range(2)))

    assert names(net) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


def test_a_sequential_of_single_layers_is_a_block_among_its_like():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(3)))

    assert names(net) == ["0", "1", "2"]


def test_equal_layers_among_others_are_found():
    net = Net(features=nn.Sequential(nn.Conv2d(3, 8, 3), Block(), nn.ReLU(), Block(), nn.Flatten()))

    assert names(net) == ["features.1", "features.3"]


def test_a_list_that_has_two_names_is_taken_once():
    layers = nn.ModuleList([Block(), Block()])

    assert names(Net(layers=layers, alias=layers)) == ["layers.0", "layers.1"]


def test_a_container_class_of_the_users_own_is_one():
    class Stack(nn.Sequential):
        pass

    assert names(Net(encoder=Stack(Block(), Block()))) == ["encoder.0", "encoder.1"]


@pytest.mark.parametrize(
    "net",
    [
        nn.Linear(3, 3),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
        Net(hidden=nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])),
        Net(only=nn.ModuleList([Block()])),
    ],
    ids=["no list", "layers of different classes", "single layers", "one entry"],
)
def test_without_blocks_it_is_refused_with_the_reason_and_the_way_out(net):
    with pytest.raises(ValueError, match=r"made of several layers, so no blocks were found .* recompute_blocks ="):
        find_blocks(net)


def test_blocks_that_hold_next_to_nothing_are_refused_with_their_share():
    net = Net(trunk=nn.Linear(200, 200), heads=nn.ModuleList([Block(2), Block(2)]))

    with pytest.raises(ValueError, match=r"2 blocks of heads \(Block\), detected, but they hold 0% of its parameters"):
        find_blocks(net)


def test_embedding_tables_do_not_count_against_the_blocks():
    net = Net(embed=nn.Embedding(10_000, 8), layers=nn.ModuleList([Block(), Block()]), head=nn.Linear(8, 10_000, False))

    assert len(find_blocks(net).modules) == 2


def test_declared_blocks_are_taken_as_they_are():
    net = Net(first=Block(), second=Other(), layers=nn.ModuleList([Block(), Block()]))
    net.recompute_blocks = [net.first, net.second]

    assert names(net) == ["first", "second"]
    assert str(find_blocks(net)) == "2 blocks of the module (Block, Other), declared"


def test_a_method_or_a_container_may_declare_them():
    net = Net(layers=nn.ModuleList([Block(), Block()]))
    net.recompute_blocks = lambda: net.layers[:1]
    assert names(net) == ["layers.0"]

    class Declares(Net):
        @property
        def recompute_blocks(self):
            return self.layers

    assert names(Declares(layers=nn.Sequential(nn.Linear(2, 2), nn.ReLU()))) == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        (lambda net: [], r"gives \[\]; it must give submodules of Net"),
        (lambda net: 3, "gives 3; it must give submodules"),
        (lambda net: ["layers"], "gives 'layers', which is no submodule of Net; give the modules themselves"),
        (lambda net: [Block()], "gives Block, which is no submodule of Net"),
        (lambda net: [net.layers], r"gives layers \(ModuleList\), which has no forward"),
        (lambda net: [net.deep, net.deep.experts[0]], "gives deep.experts.0 and deep, which holds it; give one"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(declared, text):
    net = Net(layers=nn.ModuleList([Block()]), deep=Experts())
    net.recompute_blocks = declared(net)

    with pytest.raises(ValueError, match=text):
        find_blocks(net)


def test_blocks_that_checkpoint_themselves_are_told_apart():
    net = Net(layers=nn.ModuleList([Block(), Block()]))
    net.layers[1].gradient_checkpointing = True

    assert find_blocks(net).plain == [net.layers[0]]
    assert "1 of them the module recomputes itself" in str(find_blocks(net))


def test_the_flag_of_what_holds_the_blocks_counts_where_they_have_none():
    encoder = Net(layers=nn.ModuleList([Block(), Block()]))
    encoder.gradient_checkpointing = True
    encoder.layers[0].gradient_checkpointing = False
    net = Net(encoder=encoder)

    assert find_blocks(net).plain == [encoder.layers[0]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_no_block():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))

    with pytest.raises(ValueError, match="no blocks were found"):
        find_blocks(Net(layers=nn.ModuleList([scripted, scripted])))


def test_a_module_that_has_its_forward_on_the_object_as_compiled_ones_do_is_a_block():
    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Block()
            self.forward = self.inner.__call__

    assert names(Net(layers=nn.ModuleList([Compiled(), Compiled()]))) == ["layers.0", "layers.1"]
