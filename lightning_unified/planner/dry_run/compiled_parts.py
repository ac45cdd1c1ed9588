"""Compiled code in a dry run: modules run as graphs; a compiled function ends the dry run."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_unified.cost_model.backends.patching import replaced
from lightning_unified.errors import DryRunError
from lightning_unified.nn.compiled import COMPILED_CALL, ORIGINAL, parts_with_graphs
from lightning_unified.nn.module_tree.walks import modules_of
from lightning_unified.options import compiled_only_in_training
from lightning_unified.planner.fake.compiled.call import CompiledCall
from lightning_unified.planner.fake.recorder import Recorder

__all__ = ["noticed", "run_as_compiled", "uncompiled"]

_DYNAMO = "torch._dynamo.eval_frame"


def run_as_compiled(copy: nn.Module, live: nn.Module, recorder: Recorder, *, sharded: bool = False) -> None:
    """Let the compiled parts of a fake copy run as graphs.

    These are the modules that are compiled in `live`, and the compiled functions that its modules hold as attributes.

    Args:
        copy: The fake copy; a copy of a compiled module is not compiled.
        live: The module it is a copy of.
        recorder: Notes the operations.
        sharded: Whether FSDP2 will shard the copy. Its hooks break the graph of a module's call, so that the forward is a graph of its own.
    """
    dynamo = sys.modules.get(_DYNAMO)
    if dynamo is None:
        return
    graphs: dict[Any, Any] = {}
    for owner in modules_of(copy):
        held = () if isinstance(owner, dynamo.OptimizedModule) else list(vars(owner).items())
        for name, value in held:
            if hasattr(value, ORIGINAL) and not hasattr(type(owner), name):
                vars(owner)[name] = CompiledCall(getattr(value, ORIGINAL), recorder=recorder, graphs=graphs)
    for name, part in parts_with_graphs(live).items():
        fake: Any = copy.get_submodule(name)
        if isinstance(fake, dynamo.OptimizedModule):
            inner, slot, call = fake._orig_mod, "forward", fake._orig_mod._call_impl
        elif sharded:
            inner, slot, call = fake, "forward", fake.forward
        else:
            inner, slot, call = fake, COMPILED_CALL, fake._call_impl
        vars(fake)[slot] = CompiledCall(
            call,
            module=inner,
            recorder=recorder,
            graphs=graphs,
            only_with_gradients=compiled_only_in_training(part),
        )


@contextmanager
def noticed() -> Iterator[list[str]]:
    """Yield a list of the backends of compiled functions that were called.

    `torch.compile` compiled them.
    """
    dynamo, backends = sys.modules.get(_DYNAMO), []
    if dynamo is None:
        yield backends
        return
    choose = dynamo._callback_from_stance

    def noted(callback: Any) -> Any:
        if callback not in (None, False):
            backends.append(_backend_of(callback))
        return choose(callback)

    with replaced(dynamo, "_callback_from_stance", noted):
        yield backends


@contextmanager
def uncompiled(*, refuse: bool) -> Iterator[None]:
    """Run compiled functions uncompiled inside the block.

    A dispatch mode sees no operations of compiled code.

    Args:
        refuse: Whether to raise at the end of the block if there were any.

    Raises:
        DryRunError: If a function ran that `torch.compile` would have compiled.
    """
    with torch.compiler.set_stance("force_eager") if _DYNAMO in sys.modules else nullcontext(), noticed() as backends:
        yield
    if refuse and any(backend != "eager" for backend in backends):
        raise DryRunError(
            "the step calls a function that torch.compile compiled, and its memory shows on the device only. A compiled function that a "
            "module holds as an attribute, and compiled submodules, are planned"
        )


def _backend_of(callback: Any) -> str:
    """Return the name of the backend that a callback of dynamo compiles with."""
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    return str(getattr(callback, "compiler_name", None) or getattr(callback, "__name__", ""))
