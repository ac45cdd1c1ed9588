"""Compilation: compile a module's blocks or children for one fit, if asked or if it pays."""

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.compiled import COMPILED_CALL, COMPILED_FORWARDS, Compiler, compiled_parts, mark_rows
from lightning_unified.nn.module_tree.blocks import find_blocks
from lightning_unified.nn.stand_in import FORWARD, StandIn

__all__ = ["AskedCompile", "Compilation", "CompileCost", "compile_pays", "compiled_as", "compiled_only_in_training"]

log = logging.getLogger("lightning_unified")

AskedCompile = Literal["auto", "blocks", "whole", False]
_IN_TRAINING: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_GAIN = {"cuda": 0.15}  # judgement: the least share of the step time that compiled blocks saved on an H200
_SECONDS = 60.0  # judgement: forward and backward graphs of one block, at one size and again with dynamic rows
_MARGIN = 3.0  # judgement: the seconds gained must be several times those that compilation takes


def compiled_only_in_training(module: nn.Module) -> bool:
    """Return whether `Compilation` compiled the module, so that evaluation runs it as it is."""
    return module in _IN_TRAINING


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCost:
    """The figures that decide whether compilation pays.

    Attributes:
        device: Type of the device.
        step_seconds: Predicted seconds of a step without compilation; None if unknown.
        steps: Steps that the run has left; None if unlimited.
        compile_seconds: Seconds that compilation takes.
    """

    device: str
    step_seconds: float | None
    steps: int | None
    compile_seconds: float = _SECONDS


def compile_pays(cost: CompileCost) -> tuple[bool, str]:
    """Return whether compilation saves more time than it takes, and the reason.

    The time saved is the predicted time of the remaining steps, multiplied by the least gain known for the device. It must be three times
    the time that compilation takes.
    """
    gain = _GAIN.get(cost.device)
    if gain is None:
        return False, f"no gain from compilation is known on {cost.device}"
    if cost.step_seconds is None:
        return False, "the time of a step is unknown"
    if cost.steps is None:
        return True, "the run has no last step"
    saved, needed = gain * cost.step_seconds * cost.steps, _MARGIN * cost.compile_seconds
    verdict = "pays" if saved >= needed else "does not pay"
    text = f"compilation {verdict}: {cost.steps} steps would save about {saved:.0f} s; at least {needed:.0f} s are required"
    return saved >= needed, text


class Compilation:
    """The compilation of one run, undone when it ends.

    Compiled calls run only where gradients are computed. Evaluation and generation run the modules as they are, so that they compile
    nothing for each of their lengths.

    Args:
        asked: `"blocks"` compiles the repeated blocks, `"whole"` the module's children, False nothing. `"auto"` leaves it to `decide`.

    Attributes:
        reason: Which parts are compiled, and why.
    """

    def __init__(self, asked: AskedCompile) -> None:
        self._asked: AskedCompile = asked
        self._parts: list[_CompiledCall | _CompiledForward] = []
        self._module: nn.Module | None = None
        self.reason = "as the module is"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process: the choice, without the module."""
        return {**vars(self), "_parts": [], "_module": None}

    @property
    def is_open(self) -> bool:
        """Whether `decide` may still compile."""
        return self._module is not None

    def begin(self, module: nn.Module, *, obstacle: str = "", ranks: int = 1) -> None:
        """Begin a fit of `module` with the user's setting.

        Args:
            module: The module to compile parts of.
            obstacle: Why nothing can be compiled here; empty if it can.
            ranks: Processes of the run. With several, `"auto"` compiles nothing, because their decisions could differ.

        Raises:
            ConfigurationError: If the user asked for compilation and nothing can be compiled.
        """
        self.end()
        there = compiled_parts(module)
        self.reason = "as the module is" + (f": {len(there)} compiled parts" if there else "")
        if self._asked is False:
            return
        if self._asked == "auto":
            if ranks > 1:
                obstacle = (
                    obstacle
                    or f'compile="auto" decides for one process, and this run has {ranks}; give "blocks" or False'
                )
            if obstacle or there:
                self.reason = f"not compiled: {obstacle}" if obstacle else self.reason
            else:
                self._module = module
                self.reason = "not compiled: no step has been planned yet"
            return
        if obstacle:
            raise ConfigurationError(f'compile="{self._asked}": {obstacle}; set compile=False.')
        self._compile(module, self._asked, "as asked")

    def decide(self, cost: CompileCost) -> bool:
        """Compile the blocks if that pays; return whether this changed the module."""
        module, self._module = self._module, None
        if module is None:
            return False
        pays, self.reason = compile_pays(cost)
        if not pays:
            return False
        try:
            self._compile(module, "blocks", self.reason)
        except ConfigurationError as error:
            self.reason = f"not compiled: {error}"
        return bool(self._parts)

    def _compile(self, module: nn.Module, what: Literal["blocks", "whole"], why: str) -> None:
        parts, kind = _parts_of(module, what)
        frames = _Frames()
        self._parts = [
            (_CompiledForward if isinstance(part, FSDPModule) else _CompiledCall)(part, frames) for part in parts
        ]
        self.reason = f"{why}: {kind}"
        log.info("Compiled for training, %s.", self.reason)

    def end(self) -> None:
        """Leave the module as it was before `begin`."""
        for part in self._parts:
            part.remove()
        self._parts, self._module = [], None


@contextmanager
def compiled_as(module: nn.Module, asked: AskedCompile) -> Iterator[str]:
    """Compile a module as a run would, while plans are made for it.

    Yields what is compiled, in words. A dry run partitions the graphs, and compiles no kernel.

    Raises:
        ConfigurationError: If nothing can be compiled.
    """
    if asked not in ("blocks", "whole", False):
        raise ConfigurationError(
            f'compile={asked!r}: a plan is made for "blocks", "whole" or False; "auto" decides by the length of a run.'
        )
    compilation = Compilation(asked)
    compilation.begin(module)
    try:
        yield compilation.reason
    finally:
        compilation.end()


def _parts_of(module: nn.Module, what: Literal["blocks", "whole"]) -> tuple[list[nn.Module], str]:
    """Return the modules to compile, and their description.

    Raises:
        ConfigurationError: If there are none.
    """
    there = compiled_parts(module)
    if there:
        names = ", ".join(list(there)[:3])
        raise ConfigurationError(
            f'compile="{what}": {type(module).__name__} holds compiled modules already ({names or "itself"}); set compile=False, or leave '
            "torch.compile out of the module."
        )
    if what == "whole":
        if any(isinstance(child, FSDPModule) for child in module.modules()):
            raise ConfigurationError(
                'compile="whole": a graph cannot gather the parameters that FSDP2 shards; give "blocks", or set compile=False.'
            )
        children = {
            name: child for name, child in module.named_children() if next(child.parameters(), None) is not None
        }
        if not children:
            raise ConfigurationError(f'compile="whole": {type(module).__name__} has no child modules with parameters.')
        return list(children.values()), f"whole, {', '.join(children)}"
    try:
        blocks = find_blocks(module)
    except ValueError as error:
        raise ConfigurationError(f'compile="blocks": {error}') from error
    return list(blocks.modules.values()), str(blocks)


class _Frames:
    """The functions that torch compiles, for one fit.

    Torch compiles a limited number of graphs (`torch._dynamo.config.recompile_limit`) for a code object, and runs it eagerly then. So each fit
    and each share of activations has a code object of its own, which blocks have in common.
    """

    def __init__(self) -> None:
        self._codes: dict[float | None, CodeType] = {}

    def compiled(self, function: Callable[..., Any], share: float | None) -> Callable[..., Any]:
        """Return `function` compiled, with graphs that keep a share of their activations.

        Torch's compiler begins no graph inside torch's own modules, such as `nn.TransformerEncoderLayer`. It inlines them into a function.
        """

        def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        called.__code__ = self._codes.setdefault(share, called.__code__.replace())
        return torch.compile(called, backend=Compiler(share))


class _CompiledCall:
    """The compiled call of one module, in the place where `nn.Module.compile` puts its own.

    Hooks of the module belong to the graph.
    """

    def __init__(self, module: nn.Module, frames: _Frames) -> None:
        self._module, self._frames = module, frames
        self._graph = _Graph(module._call_impl, frames)
        vars(module)[COMPILED_CALL] = self
        _IN_TRAINING.add(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._graph(*args, **kwargs)

    def keep(self, share: float | None) -> None:
        """Compile graphs that keep a share of their activations; None for the fastest graphs."""
        self._graph = _Graph(self._module._call_impl, self._frames, share)

    def remove(self) -> None:
        if vars(self._module).get(COMPILED_CALL) is self:
            del vars(self._module)[COMPILED_CALL]
        _IN_TRAINING.discard(self._module)


class _CompiledForward(StandIn):
    """The compiled forward of one module that FSDP2 shards.

    Its hooks gather the parameters before the graph runs, and free them after it.
    """

    def __init__(self, module: nn.Module, frames: _Frames) -> None:
        super().__init__(module, FORWARD)
        self._graph = _Graph(self.function, frames)
        self.install()
        _IN_TRAINING.add(module)
        COMPILED_FORWARDS.add(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._graph(*args, **kwargs)

    @override
    def remove(self) -> None:
        super().remove()
        _IN_TRAINING.discard(self.module)
        COMPILED_FORWARDS.discard(self.module)


class _Graph:
    """A function that runs compiled where gradients are computed.

    The first dimension of tensors counts as rows: a graph made at one size runs at any other, except a single row.

    Args:
        function: The function.
        frames: The functions of the fit.
        share: The share of their activations that its graphs keep; None for the fastest graphs.
    """

    def __init__(self, function: Callable[..., Any], frames: _Frames, share: float | None = None) -> None:
        self._plain = function
        self._compiled = frames.compiled(function, share)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        if not torch.compiler.is_compiling():
            mark_rows((*args, *kwargs.values()))
        return self._compiled(*args, **kwargs)
