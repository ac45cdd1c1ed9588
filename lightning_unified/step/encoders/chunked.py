"""Run a module's encoders in chunks of rows and recompute each chunk in backward."""

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import lightning as L
from torch import Tensor, nn

from lightning_unified.errors import ConfigurationError, SplitError
from lightning_unified.nn.checkpoint import recompute_call
from lightning_unified.nn.stand_in import StandIn, call_slot
from lightning_unified.step.encoders.calls import (
    EncoderCall,
    NotRowWiseError,
    call_rows,
    empty_like,
    leaves_of,
    merged,
    split_call,
)
from lightning_unified.step.encoders.check import EncoderCheck
from lightning_unified.step.exactness.gradients import tolerance_in_training
from lightning_unified.step.policy import MemoryPolicy
from lightning_unified.step.split import split_rows

__all__ = ["Encoders", "encoders_of", "find_encoders"]

T = TypeVar("T")


def encoders_of(trainer: L.Trainer, policy: MemoryPolicy, stage: str) -> "Encoders | None":
    """Return the encoders that the module's rules name for `stage`; None if they name none.

    Raises:
        ConfigurationError: If no submodule has one of the names.
    """
    module, names = trainer.lightning_module, policy.batches.of(stage).encoders
    if not names:
        return None
    encoders, check = find_encoders(module, names), None
    if policy.batches.checks("fit"):
        check = EncoderCheck(
            trainer.strategy.root_device, limit=tolerance_in_training(trainer), tell=policy.events.append
        )
    sizes = policy.sizes if stage == "fit" else policy.evaluation_sizes
    return Encoders(
        encoders, whose=type(module).__name__, unit=policy.batches.of(stage).unit, least=sizes.least, check=check
    )


class Encoders:
    """Submodules whose calls run in chunks of rows while a step runs on its whole batch.

    A call is split if it has rows: the first dimension of its first tensor argument. Every argument with the same number of rows is split.
    Any other argument goes into each chunk whole, and later calls share the argument at that path too. A call with more rows than the batch
    (two views in one call) runs in more chunks. For nested encoders only the outer call is split.

    Without gradients, chunks run one after another. With gradients, the backward pass recomputes each chunk with the same random numbers
    and buffers.

    Args:
        encoders: The submodules, by name.
        whose: The name of the module's class, for messages.
        unit: Rows that stay together.
        least: Rows that every chunk needs.
        check: Compares calls with their chunks; None skips the check.
    """

    def __init__(
        self, encoders: dict[str, nn.Module], *, whose: str, unit: int, least: int, check: EncoderCheck | None
    ) -> None:
        self._encoders, self._whose, self._check = encoders, whose, check
        self._shared: set[tuple[str, str]] = set()
        self._rows, self._unit, self._least = 1, unit, least
        self._most: int | None = None
        self._is_inside = self._was_called = False

    def run(self, step: Callable[[], T], *, rows: int, most: int | None = None) -> T:
        """Return `step()`, run with the encoders' calls in chunks.

        Args:
            step: Runs a step on a whole batch.
            rows: Largest number of rows of a chunk.
            most: In a dry run, the number of chunks of a call that run; the output's other rows are empty. None runs all chunks.

        Raises:
            SplitError: If an encoder does not treat each row by itself, or the step calls none.
        """
        self._rows, self._most, self._was_called = rows, most, False
        if self._check is not None:
            self._check.next_step()
        with self._installed():
            result = step()
        if not self._was_called:
            raise SplitError(
                f"MicroBatchRules(encoders={tuple(self._encoders)!r}) of {self._whose}: the step calls none of these submodules with rows, "
                "so nothing of it runs in chunks. Name the submodules that the step itself calls, as net(x); calls of other methods, as "
                "net.encode(x), are not seen."
            )
        return result

    @contextmanager
    def _installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, encoder in self._encoders.items():
                stack.enter_context(_StandIn(encoder, name, self._called).installed())
            yield

    def _called(self, stand_in: "_StandIn", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = {**dict(enumerate(args)), **kwargs}
        rows = None if self._is_inside else call_rows(call)
        if rows is None:
            return stand_in.function(*args, **kwargs)
        self._was_called = True
        function = _of_one(self._inside(stand_in.function), len(args))
        made = EncoderCall(
            name=stand_in.name,
            encoder=stand_in.module,
            function=function,
            arguments=call,
            roles=self._roles(stand_in.name, call, rows),
            sizes=split_rows(rows, micro_batch_size=self._rows, unit=self._unit, least=self._least),
        )
        try:
            return self._in_chunks(made)
        except NotRowWiseError as error:
            kind = type(stand_in.module).__name__
            raise SplitError(
                f"MicroBatchRules(encoders=…) of {self._whose} names {stand_in.name!r}, but this {kind} does not treat each row by itself: "
                f"{error}. Name only submodules whose output of a row depends on that row alone and that keep no state, or declare "
                "splittable=False to run batches whole."
            ) from error

    def _in_chunks(self, call: EncoderCall) -> Any:
        if self._check is not None and len(call.sizes) > 1:
            self._check.look(call, unit=self._unit)
        versions = _versions(call.arguments)
        chunks = split_call(call, call.sizes)
        outputs = [recompute_call(call.function, (chunk,), {}, owner=call.encoder) for chunk in chunks[: self._most]]
        if _versions(call.arguments) != versions:
            raise NotRowWiseError("it writes to one of its arguments in place")
        sizes = [*call.sizes[: self._most]]
        if len(sizes) < len(call.sizes):
            sizes.append(sum(call.sizes[len(sizes) :]))
            outputs.append(empty_like(outputs[0], rows=sizes[0], of=sizes[-1]))
        return merged(outputs, sizes)

    def _inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` for use in a chunk: encoder calls inside it are not split again."""

        def run(*args: Any, **kwargs: Any) -> Any:
            was_inside, self._is_inside = self._is_inside, True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_inside = was_inside

        return run

    def _roles(self, name: str, call: Any, rows: int) -> dict[str, bool]:
        """Return by path whether each argument is split.

        An argument with another number of rows in any call is shared by all chunks from then on.
        """
        roles: dict[str, bool] = {}
        for path, leaf in leaves_of(call):
            length = len(leaf) if not isinstance(leaf, Tensor) else leaf.shape[0] if leaf.dim() else None
            if length not in (rows, None):
                self._shared.add((name, path))
            roles[path] = length == rows and (name, path) not in self._shared
        return roles


class _StandIn(StandIn):
    """Replaces the calls of one encoder."""

    def __init__(
        self, encoder: nn.Module, name: str, called: Callable[["_StandIn", tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        super().__init__(encoder, call_slot(encoder))
        self.name, self._called = name, called

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the encoder's calls inside the block."""
        self.install()
        try:
            yield
        finally:
            self.restore()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(self, args, kwargs)


def _of_one(function: Callable[..., Any], count: int) -> Callable[[dict[Any, Any]], Any]:
    """Return `function` of one dict, whose first `count` entries are positional arguments."""

    def run(call: dict[Any, Any]) -> Any:
        named = {name: value for name, value in call.items() if not isinstance(name, int)}
        return function(*(call[at] for at in range(count)), **named)

    return run


def _versions(call: dict[Any, Any]) -> Sequence[int]:
    tensors = (leaf for _, leaf in leaves_of(call) if isinstance(leaf, Tensor) and not leaf.is_inference())
    return [tensor._version for tensor in tensors]


def find_encoders(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the submodules of `module` with these names, each once.

    Raises:
        ConfigurationError: If no submodule has one of the names; the message suggests the nearest ones.
    """
    known = {name: child for name, child in module.named_modules(remove_duplicate=False) if name}
    found: dict[int, tuple[str, nn.Module]] = {}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or [one for one in known if "." not in one]
            raise ConfigurationError(
                f"MicroBatchRules(encoders=…) names {name!r}, and {type(module).__name__} has no such submodule; "
                f"give names as in named_modules(), such as {', '.join(map(repr, near))}."
                if near
                else f"MicroBatchRules(encoders=…) names {name!r}, and {type(module).__name__} has no submodules."
            )
        found.setdefault(id(known[name]), (name, known[name]))
    return dict(found.values())
