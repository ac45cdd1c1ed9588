"""Find the hooks that a step registers, and remove them.

A step may register hooks once, and note that in an attribute: transformers does so for the layers whose outputs it collects. Undo takes the
attribute back. A hook that stayed would run twice once the next step has registered it again. Hooks that a step removes stay removed.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_unified.nn.second_run.libraries import is_skipped
from lightning_unified.step.undo.cells import Path, path_text

__all__ = ["HookDict", "NotedHooks", "numbers_of_handles"]

_DEEPEST = 3  # levels of containers in which handles are looked for
_OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_MODULES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class HookDict:
    """The hooks that a step has registered in one dict of a module or parameter.

    Args:
        path: The place of the dict, as Python writes it.
        hooks: The dict: hooks by number.
        others: Dicts of the same owner that hold flags of hooks, by the same numbers.
        new: The numbers of the new hooks.
    """

    def __init__(self, path: str, hooks: dict[int, Any], others: list[dict[int, Any]], new: Iterable[int]) -> None:
        self.path = path
        self._dicts = [hooks, *others]
        self._entries = [{number: one[number] for number in new if number in one} for one in self._dicts]

    def put(self, count: int) -> None:
        """Register the hooks again, or remove them if `count` is 0."""
        for entries, held in zip(self._entries, self._dicts, strict=True):
            for number, hook in entries.items():
                if count:
                    held[number] = hook
                else:
                    held.pop(number, None)

    def __len__(self) -> int:
        return len(self._entries[0])


class NotedHooks:
    """Which hooks modules and their parameters have before a step.

    Torch numbers all hooks of a process in the order in which they are registered, so one number tells old from new.

    Args:
        modules: The modules, with their paths.
    """

    def __init__(self, modules: Iterable[tuple[nn.Module, Path]]) -> None:
        self._modules = modules
        self._first = RemovableHandle.next_id

    def registered(self, *, apart_from: frozenset[int] = frozenset()) -> Iterator[HookDict]:
        """Yield the hooks registered since, except those numbered `apart_from`.

        Hooks of torch, Lightning and this package are left out, as is all other state of theirs.
        """
        if RemovableHandle.next_id == self._first:
            return
        for module, path in self._modules:
            yield from self._of(module, path, apart_from)
            for name, parameter in module._parameters.items():
                if parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
                    yield from self._of(parameter, (path, name, "attribute"), apart_from)

    def _of(self, owner: nn.Module | Tensor, path: Path, apart_from: frozenset[int]) -> Iterator[HookDict]:
        held = vars(owner) if isinstance(owner, nn.Module) else {name: getattr(owner, name) for name in _OF_PARAMETERS}
        for name in _OF_MODULES if isinstance(owner, nn.Module) else _OF_PARAMETERS:
            hooks = held.get(name)
            if not hooks:  # nearly all
                continue
            new = [
                number
                for number, hook in hooks.items()
                if number >= self._first and number not in apart_from and callable(hook) and not _is_of_engine(hook)
            ]
            if new:
                others = [one for other, one in held.items() if other.startswith(f"{name}_") and isinstance(one, dict)]
                yield HookDict(path_text((path, name, "attribute")), hooks, others, new)

    def remove(self) -> None:
        """Remove the hooks registered since."""
        for one in list(self.registered()):
            one.put(0)


def numbers_of_handles(value: Any, depth: int = 0) -> Iterator[int]:
    """Yield the numbers of the hooks whose handles `value` is or holds."""
    if isinstance(value, RemovableHandle):
        yield value.id
    elif depth < _DEEPEST and isinstance(value, (list, tuple, set, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from numbers_of_handles(entry, depth + 1)


def _is_of_engine(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return is_skipped(getattr(hook, "__module__", None))
