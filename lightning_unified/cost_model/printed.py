"""Base of records that print as a page of tables."""

from collections.abc import Callable
from typing import Any, ClassVar

__all__ = ["Printed"]


class Printed:
    """Record whose `str` is a page of tables.

    Pages are made in `render`, which imports the records. So the package sets `to_text`, and the records do not import `render`.
    """

    __slots__ = ()
    to_text: ClassVar[Callable[[Any], str]] = repr

    def __str__(self) -> str:
        return type(self).to_text(self)
