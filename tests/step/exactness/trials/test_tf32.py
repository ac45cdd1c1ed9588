"""Checks run without TF32.

Torch's switches stay readable inside, and have their old values outside.
"""

import pytest
import torch

from lightning_unified import UnifiedStrategy
from tests.support.lanes import first_cells, slow
from tests.support.modules.plain import MLP, fit

CUDNN, MATMUL = torch.backends.cudnn, torch.backends.cuda.matmul


def switches() -> list[str]:
    return [place.fp32_precision for place in (torch.backends, CUDNN, CUDNN.conv, CUDNN.rnn, MATMUL)]


def turn(how: str) -> None:
    if how in ("high", "medium"):
        torch.set_float32_matmul_precision(how)
    elif how == "older off":
        CUDNN.allow_tf32 = False
    elif how == "newer on":
        torch.backends.fp32_precision = "tf32"


@pytest.fixture(autouse=True)
def _as_before():
    before, allowed = switches(), CUDNN.allow_tf32
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    CUDNN.allow_tf32 = allowed
    for place, value in zip((CUDNN, CUDNN.conv, CUDNN.rnn, MATMUL), before[1:], strict=True):
        place.fp32_precision = value


SEEN: list[tuple[list[str], bool | None]] = []


note = SEEN.append  # a list that the step names would be put back


def look(*, reads: bool) -> None:
    note((switches()[2:], CUDNN.allow_tf32 if reads else None))


class Looking(MLP):
    """Looks at the switches while it runs; at the older one too if that is readable outside."""

    reads = True

    def training_step(self, batch, batch_idx):
        look(reads=self.reads)
        return super().training_step(batch, batch_idx)


@first_cells(1, "how", ["default", slow("high"), slow("medium"), "older off", "newer on"])
def test_checks_turn_tf32_off_and_every_switch_back(how):
    turn(how)
    before = switches()
    module = Looking().double()
    module.reads = how != "newer on"
    SEEN.clear()
    fit(module, module.loader(), strategy=UnifiedStrategy(micro_batch_size=3), max_epochs=1)

    assert "tf32" not in SEEN[0][0]
    assert SEEN[0][1] is (False if module.reads else None)
    assert SEEN[-1][0] == before[2:]
    assert switches() == before
