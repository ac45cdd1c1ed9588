"""Read the summands of the loss that a step returns."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_unified.step.exactness.losses.summands.rest import KnownRest
from lightning_unified.step.exactness.losses.summands.tree import Summand, summands_of
from lightning_unified.step.exactness.losses.summands.values import NoteScalars, left_in_compiled_parts

__all__ = ["StepSummands"]


class StepSummands:
    """Reads the summands of losses of one module.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._names = module, dict[int, tuple[Tensor, str]]()
        self._mode: NoteScalars | None = None
        self._rest = KnownRest()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the scalars that the step inside the block computes."""
        self._mode = NoteScalars()
        with left_in_compiled_parts(self._module, self._mode), self._mode:
            yield

    def of(self, loss: Tensor) -> list[Summand]:
        """Return the summands of the loss that the step in the last block returned; none if they are unknown."""
        mode, self._mode = self._mode, None
        found = [] if mode is None else summands_of(loss, mode.values, self._name_of)
        self._rest.complete(found, loss)
        return found

    def _name_of(self, parameter: Tensor) -> str:
        """Return the name of the layer that holds a parameter, or of one that the module itself holds.

        A compiled layer may have its parameters in another order. All parameters that the module does not own have the same name.
        """
        if self._known(parameter) is None:
            named = self._module.named_parameters()
            self._names = {id(one): (one, name.rpartition(".")[0] or name) for name, one in named}
        return self._known(parameter) or "another tensor"

    def _known(self, parameter: Tensor) -> str | None:
        owner, name = self._names.get(id(parameter), (None, ""))
        return name if owner is parameter else None
