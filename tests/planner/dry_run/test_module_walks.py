"""A dry run's quick walks give what torch's own walks give."""

import pytest
from torch import nn

from lightning_unified.nn.module_tree.walks import modules_of, named_modules_of, tensors_of


class Hides(nn.Module):
    """Hides its layer from walks."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self


def nested(*others):
    shared = nn.Linear(2, 2)
    module = nn.Sequential(nn.Sequential(shared, nn.BatchNorm1d(2)), shared, *others)
    module.tied, module.nothing = shared, None
    module[1].register_buffer("extra", None)
    return module


@pytest.mark.parametrize("others", [(), (Hides(),)], ids=["plain", "a walk of its own"])
def test_a_quick_walk_gives_the_modules_in_torchs_order(others):
    module = nested(*others)

    assert modules_of(module) == list(module.modules())
    assert list(named_modules_of(module).items()) == list(module.named_modules())


@pytest.mark.parametrize("others", [(), (Hides(),)], ids=["plain", "a walk of its own"])
def test_a_quick_walk_gives_parameters_and_buffers_once(others):
    module = nested(*others)
    parameters, buffers = tensors_of(module)

    assert list(map(id, parameters)) == list(map(id, module.parameters()))
    assert list(map(id, buffers)) == list(map(id, module.buffers()))
