"""Deep copies of modules: what is shared stays shared, and own states are asked for."""

from collections import OrderedDict
from typing import Any, Self

import pytest
import torch
from torch import nn

from lightning_unified.planner.fake.fake_copy import fake_copy
from lightning_unified.planner.fake.mode import fake_world


class Holder(nn.Module):
    """Two names for one empty dict, and containers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = {}
        self.ordered, self.members, self.number = OrderedDict(), set(), 3
        self.child = self.again = nn.Linear(2, 2)
        self.me = self


class Described(nn.Linear):
    """Says itself what its state is."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "described": True}


class Numbered(nn.Linear):
    """Is made with an argument."""

    def __new__(cls, size: int, *_: Any) -> Self:
        return super().__new__(cls)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.in_features,)


@pytest.fixture
def copied():
    with fake_world():
        yield lambda module: fake_copy(module, device=torch.device("cpu"))


def test_attributes_that_are_one_object_stay_one(copied) -> None:
    holder = Holder()
    copy = copied(holder)
    assert copy.first is copy.second is not holder.first
    assert copy.child is copy.again is not holder.child
    assert copy.me is copy
    assert copy.child.weight.shape == (2, 2)


def test_empty_containers_of_a_copy_are_its_own(copied) -> None:
    holder = Holder()
    copy = copied(holder)
    copy.members.add(1)
    copy.ordered["a"] = 1
    copy.register_forward_hook(lambda *_: None)
    assert not holder.members
    assert not holder.ordered
    assert not holder._forward_hooks
    assert copy.number == 3


def test_a_module_with_a_state_of_its_own_is_asked_for_it(copied) -> None:
    assert copied(Described(2, 2)).described


def test_a_module_made_with_arguments_gets_them(copied) -> None:
    assert copied(Numbered(2, 3)).weight.shape == (3, 2)


def test_names_are_in_the_order_of_the_original(copied) -> None:
    holder = Holder()
    assert list(vars(copied(holder))) == list(vars(holder))
