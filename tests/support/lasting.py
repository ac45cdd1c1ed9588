"""A number that outlasts a repeated step, for faults that fail a test's step only once."""

from weakref import WeakKeyDictionary


class Lasting:
    """An attribute of modules and callbacks that the strategy does not restore.

    Its values are kept beside the objects.

    Args:
        start: Its value at first.
    """

    def __init__(self, start=0) -> None:
        self._start, self._values = start, WeakKeyDictionary()

    def __get__(self, instance, owner):
        return self if instance is None else self._values.get(instance, self._start)

    def __set__(self, instance, value) -> None:
        self._values[instance] = value
