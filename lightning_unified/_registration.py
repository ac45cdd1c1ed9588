"""Register the strategies of this package with Lightning, now or when Lightning is imported.

This module stays at the top of the package: importing `strategies` would import Lightning.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

__all__ = ["register"]

_REGISTRY_HOME = "lightning.pytorch.strategies"
_FABRICS_HOME = "lightning.fabric.strategies"  # Lightning's strategies import these, so they are loaded before
_OTHER_HOME = "pytorch_lightning.strategies"  # of the package that holds Lightning's code under its other name
_NAMES = ("unified", "unified_ddp", "unified_fsdp")


def register() -> None:
    """Register at once if Lightning is imported already, else right after its import.

    Lightning has no entry point for strategies (2.6.6, fabric/utilities/registry.py: only callbacks have one). Importing Lightning
    here would cost some seconds in programs that only read this package's configuration.
    """
    for home, add_names in ((_REGISTRY_HOME, _add_names), (_OTHER_HOME, _add_refusals)):
        if home in sys.modules:
            add_names(sys.modules[home])
        elif not any(isinstance(finder, _AfterLightning) and finder.home == home for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterLightning(home, add_names))


def _add_names(strategies: ModuleType) -> None:
    registry = getattr(strategies, "StrategyRegistry", None)
    if registry is not None and "unified" not in registry:  # None while that module is still being executed
        registry.register("unified", _unified, description="Trains on one device inside a memory budget.")
        for suffix, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
            registry.register(
                f"unified_ddp{suffix}",
                _unified_ddp,
                description=f"Trains on several devices, each inside a memory budget, with `start_method` '{start_method}'.",
                start_method=start_method,
            )
            registry.register(
                f"unified_fsdp{suffix}",
                _unified_fsdp,
                description=f"Divides a module over several devices (FSDP2) inside a memory budget, with `start_method` '{start_method}'.",
                start_method=start_method,
            )
        for hold in ("parameters", "shards"):
            registry.register(
                f"unified_fsdp_{hold}",
                _unified_fsdp,
                description=f"Divides a module over several devices (FSDP2) inside a memory budget, with `hold` '{hold}'.",
                hold=hold,
            )

    fabric = getattr(sys.modules.get(_FABRICS_HOME), "STRATEGY_REGISTRY", None)
    if fabric is not None and "unified" not in fabric:
        for name in _NAMES:
            fabric.register(
                name, _not_for_fabric, description="For lightning.Trainer only; raises an error in Fabric.", asked=name
            )


def _add_refusals(strategies: ModuleType) -> None:
    """Register the names with `pytorch_lightning`, whose Trainer calls them unknown otherwise."""
    registry = getattr(strategies, "StrategyRegistry", None)
    if registry is not None and "unified" not in registry:
        for name in _NAMES:
            refuse = partial(_not_for_pytorch_lightning, name)
            registry.register(name, refuse, description="For lightning.Trainer only; raises an error here.")


def _not_for_pytorch_lightning(asked: str, **_options: Any) -> Any:
    raise importlib.import_module("lightning_unified.errors").ConfigurationError(
        f'pytorch_lightning.Trainer(strategy="{asked}"): this strategy is for lightning.Trainer; pytorch_lightning holds the same code as other '
        "classes. In your own code, write `import lightning.pytorch as pl`. If a library imports pytorch_lightning, call "
        "lightning_unified.replace_pytorch_lightning() before you import that library."
    )


def _not_for_fabric(*, asked: str, **_options: Any) -> Any:
    raise importlib.import_module("lightning_unified.errors").ConfigurationError(
        f'Fabric(strategy="{asked}"): this strategy is for lightning.Trainer, whose steps it splits and repeats; a Fabric program has its own '
        f'loop. Write L.Trainer(strategy="{asked}"), or leave the strategy out here.'
    )


def _unified(**options: Any) -> Any:
    return importlib.import_module("lightning_unified.strategies").UnifiedStrategy(**options)


def _unified_ddp(**options: Any) -> Any:
    return importlib.import_module("lightning_unified.strategies").UnifiedDDPStrategy(**options)


def _unified_fsdp(**options: Any) -> Any:
    return importlib.import_module("lightning_unified.strategies").UnifiedFSDPStrategy(**options)


class _AfterLightning(importlib.abc.MetaPathFinder):
    """Import hook that registers our strategies once Lightning's are executed.

    It finds Lightning's strategies as Python would, and removes itself afterwards.
    """

    def __init__(self, home: str, add_names: Callable[[ModuleType], None]) -> None:
        self.home, self._add_names = home, add_names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.home:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader, self._add_names)
        return spec


class _ThenRegister(importlib.abc.Loader):
    """A loader that delegates to the real one, then registers our strategies."""

    def __init__(self, loader: Any, add_names: Callable[[ModuleType], None]) -> None:
        self._loader, self._add_names = loader, add_names

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._add_names(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # resources and source come from the real loader
