"""The pytest plugin of lightning-unified: the fixture `memory_budget`.

It fails a test whose module needs too much memory.

    def test_fits(memory_budget):
        with memory_budget("12GiB", device="m2-16gb"):
            ...

pytest loads this module in every session of an environment that has the package. It stands beside the package because importing any
module of `lightning_unified` registers its strategies. A test that forgot `import lightning_unified` would then pass where its script fails.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lightning_unified.pytest_plugin import MemoryUsed

__all__ = ["memory_budget"]


@pytest.fixture
def memory_budget() -> "Callable[..., AbstractContextManager[MemoryUsed]]":
    """Return `memory_budget(budget, *, device, holding=())`, the context manager `budgeted`."""
    from lightning_unified.pytest_plugin import budgeted

    return budgeted
