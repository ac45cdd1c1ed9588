"""State that a block reads besides its arguments, as it was before the block's first run."""

import contextlib
import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_unified.nn.second_run.generators import is_generator
from lightning_unified.nn.second_run.libraries import is_ours

__all__ = ["BlockState"]

_SMALL = 1 << 8  # entries of a tensor that is copied; larger ones are left to the comparison of both runs
_WIDEST = 1000  # entries of a container that are visited; a longer one is noted, and its entries are not
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}  # dicts of parameters, buffers, children and hooks
_HOOKS = frozenset({"_forward_pre_hooks", "_forward_hooks"})  # those that run in the second run too
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


class BlockState:
    """Attributes of a block's modules and containers in reach, noted before the first run.

    Noted are, each by a shallow copy:

    - the attributes of each module, among them `training`, and its dicts of parameters, buffers, children and hooks;
    - lists, dicts, sets and deques among these attributes and among the arguments, and nested ones;
    - attributes of users' objects in these places, and lists, dicts, sets and deques among them;
    - the same in closures of functions in these places and of hooks of the block's submodules, such as the module around the block;
    - the cache of `torch.nn.utils.parametrize.cached`.

    Small tensors without a gradient in these places are copied, so that the second run reads their old values too. Objects in
    attributes of objects are not noted.

    Args:
        block: The block; None for a function.
        values: The arguments of the call.

    Attributes:
        generators: The generators in these places.
        has_buffers: Whether the block has buffers.
    """

    def __init__(self, block: nn.Module | None, values: Iterable[Any]) -> None:
        self._noted: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        self.generators: list[Any] = []
        self.has_buffers = False
        self._outside: list[nn.Module] = []
        self._parameters: set[int] = set()
        self._cache = parametrize._cache_enabled, parametrize._cache
        if parametrize._cache_enabled:
            self._note(parametrize._cache)
        for value in values:
            if not isinstance(value, Tensor):  # the runs see to tensors that are arguments themselves
                self._visit(value)
        if block is not None:
            self._visit_modules(block)
        for module in self._outside:
            self._visit_outside(module)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Set the noted state inside the context, and afterwards the present one."""
        written = {id(tensor): copy.clone() for tensor, version, copy in self._tensors if tensor._version != version}
        current = [(target, _copied(target)) for target, _ in self._noted]
        cache = parametrize._cache_enabled, parametrize._cache
        try:
            for target, noted in self._noted:
                self._put(target, _replaced(noted, written) if written else noted)
            parametrize._cache_enabled, parametrize._cache = self._cache
            yield
        finally:
            parametrize._cache_enabled, parametrize._cache = cache
            for target, content in current:
                self._put(target, content)

    def _put(self, target: Any, content: Any) -> None:
        """Give a container other contents; FSDP2 itself exchanges shards and gathered parameters."""
        if not _has(target, content) and not (id(target) in self._parameters and _has_shards(target, content)):
            _put(target, content)

    def _visit_modules(self, block: nn.Module) -> None:
        left = [block]
        while left:
            module = left.pop()
            own = vars(module)
            if id(own) in self._seen:
                continue
            self._note(own)
            for name, value in own.items():
                if type(value) in _INERT:
                    continue
                if name not in _OF_MODULES:
                    self._visit(value)
                elif value and isinstance(value, dict | set):  # a scripted module has others
                    self._note(value)
                    if name == "_parameters":
                        self._parameters.add(id(value))
                    elif name == "_buffers":
                        self.has_buffers = True
                    elif name in _HOOKS and module is not block and isinstance(value, dict):
                        for hook in value.values():  # those of the block itself run once
                            self._visit(hook)
            if isinstance(module, torch.jit.ScriptModule):  # its buffers are in no dict
                self.has_buffers |= next(module.buffers(), None) is not None
            left.extend(child for child in module._modules.values() if child is not None)

    def _visit_outside(self, module: nn.Module) -> None:
        """Note the attributes of a module that is not part of the block, such as the one around it."""
        own = vars(module)
        if id(own) in self._seen:
            return
        self._note(own)
        for name, value in own.items():
            if name not in _OF_MODULES and type(value) not in _INERT:
                self._visit(value, enters=False)

    def _visit(self, value: Any, *, enters: bool = True) -> None:
        """Note a value; `enters` tells whether functions and objects of the user are searched."""
        kind = type(value)
        if _is_inert(kind) or id(value) in self._seen:
            return
        if isinstance(value, Tensor):
            self._note_tensor(value)
        elif is_generator(kind):
            self._seen.add(id(value))
            self.generators.append(value)
        elif isinstance(value, nn.Module):
            if enters:
                self._outside.append(value)
        elif kind in _FUNCTIONS:
            for held in _held_by(value) if enters else ():
                self._visit(held)
        elif kind is types.CellType:
            self._note(value)
            for content in _content_of(value):
                self._visit(content)
        elif not issubclass(kind, _CONTAINERS):
            if enters:
                self._visit(vars(value), enters=False)
        else:
            if kind is not tuple and not issubclass(kind, tuple):
                self._note(value)
            if len(value) <= _WIDEST:
                for entry in value.values() if isinstance(value, dict) else value:
                    if type(entry) not in _INERT:
                        self._visit(entry, enters=enters)

    def _note(self, target: Any) -> None:
        self._seen.add(id(target))
        self._noted.append((target, _copied(target)))

    def _note_tensor(self, tensor: Tensor) -> None:
        self._seen.add(id(tensor))
        if not tensor.requires_grad and tensor.numel() <= _SMALL and not tensor.is_inference():
            self._tensors.append((tensor, tensor._version, tensor.clone()))


_INERT = frozenset({bool, int, float, complex, str, bytes, type(None), nn.Parameter})


@functools.lru_cache(maxsize=4096)
def _is_inert(kind: type) -> bool:
    """Return whether values of the type `kind` have no state that is noted."""
    known = (*_CONTAINERS, *_FUNCTIONS, types.CellType, Tensor, nn.Module)
    if issubclass(kind, nn.Parameter):
        return True
    if issubclass(kind, known) or is_generator(kind):
        return False
    is_shared = kind.__module__ == "queue"  # threads write queues at any time
    return issubclass(kind, type | types.ModuleType) or not kind.__dictoffset__ or is_ours(kind) or is_shared


_CONTAINERS = (dict, list, set, deque, tuple)


def _held_by(function: Any) -> tuple[Any, ...]:
    """Return the values that a function may read and write besides its arguments and globals."""
    if isinstance(function, types.MethodType):
        return function.__self__, function.__func__
    if isinstance(function, functools.partial):
        return function.func, function.args, function.keywords
    return *(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__


def _content_of(cell: types.CellType) -> list[Any]:
    """Return the value of a closure variable in a list, which is empty before it is assigned."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _copied(target: Any) -> Any:
    """Return a shallow copy of a container, as a plain container.

    Derived classes may have other methods than their bases, so the methods of the bases are called.
    """
    if isinstance(target, types.CellType):
        return _content_of(target)
    if isinstance(target, OrderedDict):
        return dict(OrderedDict.items(target))
    if isinstance(target, dict):
        return dict.copy(target)
    return set.copy(target) if isinstance(target, set) else list(target)


def _has(target: Any, content: Any) -> bool:
    """Return whether a container has these contents, the same objects in the same order."""
    if isinstance(target, types.CellType):
        target = _content_of(target)
    if isinstance(target, set):
        return target == content
    if len(target) != len(content):
        return False
    if isinstance(target, dict):
        return all(map(is_, dict.values(target), content.values())) and all(map(is_, dict.keys(target), content))
    return all(map(is_, target, content))


def _put(target: Any, content: Any) -> None:
    """Give a container other contents, by the methods of its base class."""
    if isinstance(target, dict):
        _put_dict(target, content)
    elif isinstance(target, set):
        set.clear(target)
        set.update(target, content)
    elif isinstance(target, deque):
        deque.clear(target)
        deque.extend(target, content)
    elif isinstance(target, types.CellType):
        if content:
            target.cell_contents = content[0]
        else:
            del target.cell_contents
    else:
        list.__setitem__(target, slice(None), content)


def _put_dict(target: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    base: Any = OrderedDict if isinstance(target, OrderedDict) else dict
    for name in [name for name in base.keys(target) if name not in content]:
        base.__delitem__(target, name)
    for name, value in content.items():
        if name not in target or base.__getitem__(target, name) is not value:
            base.__setitem__(target, name, value)
    if list(base.keys(target)) != list(content):
        base.clear(target)
        for name, value in content.items():
            base.__setitem__(target, name, value)


def _has_shards(*parameters: Mapping[str, Any]) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")
    values = (one for each in parameters for one in each.values())
    return distributed is not None and any(isinstance(one, distributed.DTensor) for one in values)


def _replaced(content: Any, written: Mapping[int, Tensor]) -> Any:
    """Return the contents with the tensors in `written`, by id, in the place of others."""
    if isinstance(content, dict):
        return {name: written.get(id(value), value) for name, value in content.items()}
    if isinstance(content, set):
        return {written.get(id(value), value) for value in content}
    return [written.get(id(value), value) for value in content]
