"""Check on a few rows of a real call that an encoder treats each row by itself."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_unified.step.encoders.calls import EncoderCall, NotRowWiseError, leaves_of, mapped, merged, split_call
from lightning_unified.step.encoders.isolation import (
    IsolatedEncoder,
    everything_off,
    noise_off,
    statistics_off,
    written,
)
from lightning_unified.step.recovery.oom import caught, release_cached_memory

__all__ = ["EncoderCheck"]

log = logging.getLogger("lightning_unified")

_MOST = 6  # units of rows to compare, in chunks of 1, 2 and 3: sums and means over unequal chunks differ
_ENTRIES = 16384  # compared entries of each parameter's gradient, roughly
_BFLOAT16 = 1e-2  # a limit above this is the one for bfloat16, see `exactness.gradients`

_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
)  # errors in eval mode, which the encoder of a training step need not support


class EncoderCheck:
    """Compares outputs and parameter gradients of a few rows, whole and in unequal chunks.

    Random noise is off. The check covers the first call of each kind: which arguments are split, their types, train or eval mode, with or
    without gradients. It repeats for one call of each kind in the chunked steps 2, 4, 8, 16 and so on. It runs as many rows as a chunk
    has, at least two units and at most six.

    Args:
        device: The device whose random generator is restored, and whose cached memory is released.
        limit: Largest relative difference that counts as rounding.
        tell: Receives each finding of a run, in words.
    """

    def __init__(self, device: torch.device, *, limit: float, tell: Callable[[str], None]) -> None:
        self._device, self._limit, self._tell = device, limit, tell
        self._steps = 0
        self._seen: set[tuple[Any, ...]] = set()
        self._reported: set[tuple[str, str]] = set()

    def next_step(self) -> None:
        """Record that another step runs in chunks."""
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:
            self._seen.clear()

    def look(self, call: EncoderCall, *, unit: int) -> None:
        """Compare a few rows of a call, unless a call of its kind has been compared.

        Raises:
            NotRowWiseError: If the results whole and in chunks differ, or the encoder writes state.
        """
        if call.kind in self._seen:
            return
        self._seen.add(call.kind)
        units = min(sum(call.sizes) // unit, _MOST, max(max(call.sizes) // unit, 2))
        sizes = [unit * count for count in (1, min(2, units - 1), units - 3) if count > 0]
        rows = sum(sizes)
        few = split_call(call, [rows, sum(call.sizes) - rows])[0]
        _, reason = caught(partial(self._look, call, few, sizes))
        if reason is not None:
            release_cached_memory(self._device)
            self._say(call.name, "is not checked", f"memory ran out in {rows} of its rows")

    def _look(self, call: EncoderCall, few: dict[Any, Any], sizes: Sequence[int]) -> None:
        with IsolatedEncoder(call.encoder, self._device) as aside, torch.no_grad():
            statistics_off(call.encoder)
            if self._draws(call, few, sizes, aside):
                self._say(
                    call.name, "draws random numbers (dropout)", "for each chunk, not for the whole batch at once"
                )
        off = self._off(call, few, sizes, quieten=noise_off)
        if off is None:
            with suppress(*_FAILURES):
                off = self._off(call, few, sizes, quieten=everything_off)
        if off is None:
            self._say(call.name, "is not checked", "it draws random numbers in eval mode too, so no two runs agree")
        else:
            self._say(
                call.name, "treats each row by itself", f"whole and in chunks, {sum(sizes)} rows differ by {off:.1e}"
            )

    def _say(self, name: str, what: str, detail: str) -> None:
        """Report a finding once a run."""
        if (name, what) not in self._reported:
            self._reported.add((name, what))
            finding = f"encoder {name!r}, which runs in chunks of rows, {what}: {detail}"
            self._tell(finding)
            log.log(logging.WARNING if what == "is not checked" else logging.INFO, "The %s.", finding)

    def _draws(self, call: EncoderCall, few: dict[Any, Any], sizes: Sequence[int], aside: IsolatedEncoder) -> bool:
        """Return whether a call draws random numbers.

        Raises:
            NotRowWiseError: If the first call writes a buffer, or the second call writes any state.
        """
        first = split_call(call.with_arguments(few, sizes), sizes)[0]
        before = aside.state()
        try:
            draws = aside.draws(lambda: call.function(_own(few)))  # may fill caches, which do not count as state
            between = aside.state()
            call.function(_own(first))
        except Exception as error:
            error.add_note(
                f"Raised when {sum(sizes)} of {sum(call.sizes)} rows ran through {call.name!r}, which MicroBatchRules(encoders=…) names."
            )
            raise
        name = written(between, aside.state())
        if name is None:
            name = written(before, between, only="buffer")
        if name is not None:
            raise NotRowWiseError(f"each call writes {name}")
        return draws

    def _off(
        self, call: EncoderCall, few: dict[Any, Any], sizes: Sequence[int], *, quieten: Callable[[nn.Module], None]
    ) -> float | None:
        """Return the relative difference between the rows whole and in chunks.

        The result is None if two whole runs differ as much.

        Raises:
            NotRowWiseError: If the difference is larger than rounding.
        """
        with IsolatedEncoder(call.encoder, self._device):
            quieten(call.encoder)
            whole = self._result(call, call.function(_own(few)))
            chunks = split_call(call.with_arguments(few, sizes), sizes)
            parts = self._result(call, merged([call.function(_own(chunk)) for chunk in chunks], sizes))
            off, where = self._difference(whole, parts)
            if off <= self._limit:
                return off
            if self._difference(whole, self._result(call, call.function(_own(few))))[0] > self._limit:
                return None
        split = ", ".join(path for path, is_split in call.roles.items() if is_split)
        counts = ", ".join(map(str, sizes))
        raise NotRowWiseError(
            f"{where} of {sum(sizes)} rows whole and in chunks of {counts} rows differ by {off:.1e}, relative to their size, and at "
            f"most {self._limit:.0e} is rounding (arguments split by rows: {split})"
        )

    def _result(self, call: EncoderCall, output: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of an output, and samples of the parameters' gradients.

        The gradients are those of a fixed weighted sum of the output's entries.
        """
        leaves = {path: leaf for path, leaf in leaves_of(output) if isinstance(leaf, Tensor)}
        trained = {name: one for name, one in call.encoder.named_parameters() if one.requires_grad}
        terms = [(leaf * _factors(leaf)).sum() for leaf in leaves.values() if leaf.requires_grad]
        gradients: Sequence[Tensor | None] = [None] * len(trained)
        if terms and trained:
            gradients = torch.autograd.grad(sum(terms[1:], terms[0]), list(trained.values()), allow_unused=True)
        named = zip(trained, gradients, strict=True)
        sampled = {name: _sample(gradient) for name, gradient in named if gradient is not None}
        return {path: leaf.detach() for path, leaf in leaves.items()}, sampled

    def _difference(
        self, whole: tuple[dict[str, Tensor], dict[str, Tensor]], parts: tuple[dict[str, Tensor], dict[str, Tensor]]
    ) -> tuple[float, str]:
        """Return the largest relative difference, and the name of the tensor that has it."""
        found = [(0.0, "results")]
        for path, one in whole[0].items():
            other = parts[0].get(path)
            if other is None or other.shape != one.shape:
                raise NotRowWiseError(f"the output {path!r} of whole rows has another shape than that of chunks")
            found.append((_distance(one, other, floor=0.0), f"the output {path!r}" if path else "the output"))
        sizes = [gradient.square().mean().sqrt() for gradient in whole[1].values()]
        share = 1.0 if self._limit > _BFLOAT16 else 0.1  # of all gradients' size, added to the size of each one
        floor = share * float(torch.stack(sizes).square().mean().sqrt()) if sizes else 0.0
        for name, one in whole[1].items():
            other = parts[1].get(name, torch.zeros_like(one))
            found.append((_distance(one, other, floor=floor), f"the gradient of {name!r}"))
        return max(found)


def _own(arguments: dict[Any, Any]) -> dict[Any, Any]:
    """Return the arguments with copied tensors, because an encoder may write in place."""

    def copied(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        copy = leaf.detach().clone()
        return copy.requires_grad_() if leaf.requires_grad and torch.is_grad_enabled() else copy

    return mapped(arguments, copied)


def _factors(leaf: Tensor) -> Tensor:
    """Return a fixed factor for each entry of `leaf`.

    A plain sum would not do, because the sum of normalised outputs has no gradient.
    """
    return torch.arange(leaf.numel(), device=leaf.device).cos().to(leaf.dtype).view(leaf.shape)


def _sample(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.flatten()[:: dense.numel() // _ENTRIES | 1].cpu().double()


def _distance(one: Tensor, other: Tensor, *, floor: float) -> float:
    """Return the distance between two tensors, relative to the size of `one` plus `floor`.

    Entries that are equal, or NaN in both, have no distance.
    """
    if not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other) else float("inf")
    same = (one == other) | (one.isnan() & other.isnan())
    wide = torch.complex128 if one.is_complex() else torch.float64 if one.device.type != "mps" else torch.float32
    first, second = one.to(wide), other.to(wide)
    apart = float(torch.where(same, 0.0, first - second).abs().square().mean().sqrt())
    size = float(torch.where(first.isfinite(), first, 0.0).abs().square().mean().sqrt()) + floor
    return 0.0 if apart == 0 else apart / size if size > 0 and apart == apart else float("inf")  # noqa: PLR0124  # NaN is far
