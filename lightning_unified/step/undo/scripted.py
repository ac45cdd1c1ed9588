"""State of TorchScript modules, which their objects do not hold."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.jit._script import RecursiveScriptModule

from lightning_unified.step.undo.cells import Cell, Path

__all__ = ["ScriptCell"]


class ScriptCell(Cell):
    """The attributes of a TorchScript module: buffers and values that its code may assign.

    TorchScript returns a new list, dict or number at each read. A copy therefore holds the object of the copy before it while the two are
    equal.
    """

    __slots__ = ("_last", "_names")

    def __init__(self, module: RecursiveScriptModule, path: Path) -> None:
        super().__init__(module._c, path, style="attribute")
        attributes = module._concrete_type.get_attributes()
        kept = [name for name, (_, is_parameter) in attributes.items() if not is_parameter]
        self._names = [name for name in kept if name not in _NEVER_SET]
        self._last: dict[str, Any] = {}

    def copy(self) -> dict[str, Any]:
        read, last = self.target.getattr, self._last
        now = {name: value for name in self._names if isinstance(value := read(name), _SCRIPTED)}
        self._last = {
            name: last[name] if name in last and _is_equal(last[name], value) else value for name, value in now.items()
        }
        return self._last

    def restore(self, noted: dict[str, Any]) -> None:
        now = self.copy()
        for name, value in noted.items():
            if now[name] is not value:
                self.put(name, value)

    def entries(self, noted: dict[str, Any]) -> Iterable[tuple[Any, Any]]:
        return noted.items()

    def put(self, name: Any, value: Any) -> None:
        self.target.setattr(name, value)


_NEVER_SET = frozenset({"_is_full_backward_hook"})  # of each module; TorchScript code cannot change it
_SCRIPTED = (Tensor, bool, int, float, complex, str, type(None), list, tuple, dict)


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two values of TorchScript are equal; tensors are compared by identity."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Tensor):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other)
