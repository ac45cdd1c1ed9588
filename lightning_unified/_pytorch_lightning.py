"""Train modules of libraries that import `pytorch_lightning`, Lightning's other name.

The packages `lightning` and `pytorch_lightning` hold the same code twice, as different classes. A Trainer of one refuses modules and
strategies of the other. `replace_pytorch_lightning` makes both names mean one package.

This module stays at the top of the package, beside `_registration`: it imports neither torch nor Lightning before it is used.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

__all__ = ["OTHER_NAMES", "replace_pytorch_lightning"]

OTHER_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def replace_pytorch_lightning() -> None:
    """Let `import pytorch_lightning` return `lightning.pytorch`, and `lightning_fabric` `lightning.fabric`.

    Call it before the first import of a library that imports `pytorch_lightning`. Processes that are spawned have to call it too.

    Raises:
        ConfigurationError: If `pytorch_lightning` has been imported already.
    """
    late = [name for name, real in OTHER_NAMES.items() if name in sys.modules and sys.modules[name].__name__ != real]
    if late:
        raise importlib.import_module("lightning_unified.errors").ConfigurationError(
            f"replace_pytorch_lightning() was called after {' and '.join(late)} had been imported, so classes of both packages would meet. Call it "
            "before the import of any library that imports pytorch_lightning, at the top of the script."
        )
    if not any(isinstance(finder, _ByOtherName) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ByOtherName())


class _ByOtherName(importlib.abc.MetaPathFinder):
    """Import hook that finds Lightning's modules by their other names."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        top, dot, rest = fullname.partition(".")
        if top not in OTHER_NAMES:
            return None
        real = f"{OTHER_NAMES[top]}{dot}{rest}"
        try:
            is_there = importlib.util.find_spec(real) is not None
        except ModuleNotFoundError:  # of a package above it
            is_there = False
        return importlib.machinery.ModuleSpec(fullname, _Existing(real)) if is_there else None


class _Existing(importlib.abc.Loader):
    """A loader that returns the module of another name, as it is."""

    def __init__(self, real: str) -> None:
        self._real = real
        self._spec: importlib.machinery.ModuleSpec | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:  # noqa: ARG002
        module = importlib.import_module(self._real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has replaced it by the other name's
