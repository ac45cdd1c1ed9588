"""Bytes of optimizer state.

Before the first step the optimizer's class gives them; afterwards they are the real ones.
"""

import pytest
import torch
from torch import nn
from torch.optim import Adam, RMSprop

from lightning_unified.cost_model import static_bytes
from lightning_unified.errors import ConfigurationError


class Codes(torch.Tensor):
    """8-bit codes and a scale that act as a float32 tensor.

    torchao's optimizer states do so.
    """

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


def test_8_bit_state_counts_its_parts_and_unknown_optimizers_count_0_before_a_step():
    class Other(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

    layer = nn.Linear(64, 64, bias=False)
    optimizer = Other(layer.parameters())
    assert static_bytes(layer, [optimizer])["optimizer state"] == 0

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


def test_lazy_layers_without_sizes_are_refused_by_name():
    module = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))

    with pytest.raises(ConfigurationError, match=r"2 weights of lazy layers .*0\.weight.*Run the layers once"):
        static_bytes(module)

    module(torch.ones(1, 3))
    assert static_bytes(module)["weights"] == 4 * (3 * 4 + 4 + 4 * 2 + 2)
