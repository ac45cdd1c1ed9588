"""Select the settings that each module is measured with.

In the selection from the full product every pair of settings is about as frequent.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations, product
from typing import Any

from benchmarks.planner.zoo.learner import OPTIMIZERS
from benchmarks.planner.zoo.modules import Kind, available

__all__ = ["Cell", "select"]

_PRECISIONS = {"cpu": ("32-true", "bf16-mixed", "bf16-true"), "cuda": ("32-true", "bf16-mixed", "16-mixed")}
_EACH = {
    "cpu": 4,
    "cuda": 6,
}  # settings a module; with the libraries of the hub missing there are still 64 and 96 cells


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One module with one choice of settings."""

    module: str
    device: str
    precision: str
    recompute: bool
    optimizer: str
    rows: int

    @property
    def key(self) -> str:
        """Its name in a record."""
        how = "recomputed" if self.recompute else "kept"
        return f"{self.device} | {self.module} | {self.precision} | {how} | {self.optimizer} | {self.rows} rows"

    @property
    def kind(self) -> Kind:
        return available()[self.module]

    def to_dict(self) -> dict[str, Any]:
        return {"cell": self.key, **asdict(self)}


def select(device: str) -> list[Cell]:
    """Return the cells of `device`, those of one module together."""
    seen: Counter = Counter()
    return [cell for kind in available().values() for cell in _of_module(kind, device, seen)]


def _of_module(kind: Kind, device: str, seen: Counter) -> Iterator[Cell]:
    """Yield those of a module's settings whose pairs were met least often.

    `seen` counts on from module to module.
    """
    left = list(product(_PRECISIONS[device], (False, True)[: 1 + kind.has_blocks], OPTIMIZERS, (0, 1)))
    own: Counter = Counter()
    for _ in range(_EACH[device] if kind.settings is None else kind.settings):
        chosen = min(left, key=lambda one: 4 * _often(one, own) + _often(one, seen))
        left.remove(chosen)
        for counter in (own, seen):
            counter.update(_parts(chosen))
        precision, recompute, optimizer, rows = chosen
        yield Cell(
            module=kind.name,
            device=device,
            precision=precision,
            recompute=recompute,
            optimizer=optimizer,
            rows=kind.size(device).rows[rows],
        )


def _parts(chosen: tuple) -> list[tuple]:
    """Return the settings one by one and two by two."""
    named = list(enumerate(chosen))
    return [(one,) for one in named] + list(combinations(named, 2))


def _often(chosen: tuple, seen: Counter) -> int:
    return sum(seen[part] for part in _parts(chosen))
