"""Still cells notice every write to the values they hold.

Small tensors are copied in stacks, whatever happens to them.
"""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from lightning_unified.step.undo import still
from lightning_unified.step.undo.cells import ListCell, MappingCell
from lightning_unified.step.undo.still import StillCells
from lightning_unified.step.undo.tensors import TensorKeeper
from lightning_unified.step.undo.walk import FoundTensor


@pytest.fixture(params=[True, False], ids=["with versions", "without versions"])
def _versions(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(still, "_are_kept", lambda: False)


def held() -> tuple[Any, ...]:
    """Return a layer, a dict, an ordered dict and a list, and still cells of all."""
    layer, entries, ordered, values = nn.Linear(2, 2), {"a": 1000, "b": 2000}, OrderedDict(a=1, b=2), [1000, 2000]
    skip = frozenset(vars(nn.Module())) - {"training"}
    cells: list[Any] = [
        MappingCell(vars(layer), (None, "layer", "global"), style="attribute", skip=skip),
        MappingCell(entries, (None, "entries", "global")),
        MappingCell(ordered, (None, "ordered", "global")),
        ListCell(values, (None, "values", "global")),
    ]
    noted = [(cell, cell.copy()) for cell in cells]
    return layer, entries, ordered, values, StillCells(noted, empty=[layer._buffers, layer._modules], counted=[values])


def contents(layer, entries, ordered, values):
    return dict(vars(layer)), list(entries.items()), list(ordered.items()), list(values)


WRITES = {
    "an attribute assigned": lambda layer, *_: setattr(layer, "in_features", 3),
    "an attribute of an equal value": lambda layer, *_: setattr(layer, "training", 1),
    "an attribute added": lambda layer, *_: setattr(layer, "late", 1),
    "an attribute deleted": lambda layer, *_: delattr(layer, "in_features"),
    "a buffer registered": lambda layer, *_: layer.register_buffer("late", torch.zeros(1)),
    "a submodule assigned": lambda layer, *_: setattr(layer, "late", nn.Identity()),
    "an entry of an equal object": lambda _, entries, *__: entries.update(a=int("1000")),
    "a key renamed": lambda _, entries, *__: entries.update(c=entries.pop("b")),
    "an ordered dict's order": lambda _, __, ordered, *___: ordered.move_to_end("a"),
    "a list's entry": lambda *things: things[3].__setitem__(0, 3),
    "a list's length": lambda *things: things[3].append(3),
}


@pytest.mark.parametrize("looks", [1, 3])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.usefixtures("_versions")
def test_every_write_is_noticed_and_put_back(write, looks):
    *things, cells = held()
    layer, before = things[0], contents(*things)
    assert all(cells.are_same() for _ in range(looks))

    write(*things)
    assert not cells.are_same()
    assert not cells.are_same()

    if not layer._buffers and not layer._modules:  # an empty dict only tells that all is to be looked at
        cells.restore()
        assert cells.are_same()
        assert contents(*things) == before


@pytest.mark.parametrize("few", [0, 64], ids=["many written", "few written"])
@pytest.mark.usefixtures("_versions")
def test_a_write_that_changes_nothing_is_no_change_and_hides_none(few, monkeypatch):
    monkeypatch.setattr(still, "_FEW", few)
    layer, entries, *_, cells = held()
    assert cells.are_same()
    for _ in range(3):
        layer.eval().train()
        entries["c"] = entries.pop("b")
        entries["b"] = entries.pop("c")
        assert cells.are_same()
    layer.in_features = 3
    assert not cells.are_same()


@pytest.mark.usefixtures("_versions")
def test_attributes_that_are_left_out_make_no_empty_dict_a_changed_one():
    """A compiled call writes attributes of its own on the parameters that it gets."""
    weight = nn.Parameter(torch.zeros(2))
    cell = MappingCell(vars(weight), (None, "weight", "global"), style="attribute", skip=frozenset({"of_compiler"}))
    weight.of_compiler = "static"
    cells = StillCells([(cell, cell.copy())], empty=[], counted=[])
    assert cells.are_same()

    weight.late = 1
    assert not cells.are_same()


def test_versions_are_not_copied_to_another_process():
    with pytest.raises(TypeError, match="belong to their process"):
        still.DictVersions([{}]).__reduce__()


def noted(tensors):
    """Return a keeper with a note of `tensors`, which stay in their places."""
    found = [FoundTensor(one, (None, str(index), "global"), (0, index)) for index, one in enumerate(tensors)]
    keeper = TensorKeeper()
    keeper.learn(keeper.note(found, []))
    return lambda: keeper.note(found, [])


KINDS = {
    "shape": lambda one: torch.cat([one, one]),
    "dtype": lambda one: one.half(),
    "wider dtype": lambda one: one.double(),
}


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("change", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("when", ["before the note", "in the step"])
def test_a_tensor_whose_data_become_of_another_kind_is_put_back(change, count, when):
    tensors = [torch.full((4,), float(index)) for index in range(6)]
    note = noted(tensors)
    note()

    if when == "before the note":
        for one in tensors[-count:]:
            one.data = change(one)
    before, state = [one.clone() for one in tensors], note()
    for one in tensors:
        one.data.mul_(2).add_(1)
    if when == "in the step":
        for one in tensors[-count:]:
            one.data = change(one)
    state.restore()

    for one, expected in zip(tensors, before, strict=True):
        assert one.dtype == expected.dtype
        assert torch.equal(one, expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_small_tensors_are_put_back_whatever_mode_the_note_was_taken_in(mode):
    tensors = [torch.zeros(4, requires_grad=index % 2 == 0) for index in range(6)]
    note = noted(tensors)
    with mode():
        note()
        state = note()
    with torch.no_grad():
        for one in tensors:
            one.add_(1)
    state.restore()
    assert all(torch.equal(one, torch.zeros(4)) for one in tensors)
    assert not any(copy.requires_grad for _, copy in state.copied)
