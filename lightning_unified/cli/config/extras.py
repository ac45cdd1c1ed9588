"""Name the extra that installs a missing package: `pip install 'lightning-unified[models]'`."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires

__all__ = ["extra_for", "missing_packages"]

_REQUIREMENT = re.compile(r"(?P<package>[\w.-]+).*;\s*extra\s*==\s*[\"'](?P<extra>[\w-]+)[\"']")
_WHOLE = {"dev", "all"}  # extras for developers


def missing_packages(error: BaseException) -> Iterator[str]:
    """Yield the top-level names of missing modules, from `error` and its causes."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ModuleNotFoundError) and seen.name:
            yield seen.name.partition(".")[0]
        seen = seen.__cause__ or seen.__context__


def extra_for(package: str, *, target: str = "") -> str | None:
    """Return the extra of lightning-unified that installs `package`; None if none does.

    Args:
        package: The name under which it is imported.
        target: The dotted name of the object that needs the package. An extra that it names comes first.
    """
    try:
        lines = requires("lightning-unified") or []
    except PackageNotFoundError:  # run from a folder, not installed
        return None
    found = (_REQUIREMENT.match(line) for line in lines)
    names = [one["extra"] for one in found if one and _normal(one["package"]) == _normal(package)]
    extras = [name for name in names if name not in _WHOLE]
    named = (part for part in reversed(target.split(".")) if part in extras)  # the last part is the most specific
    return next(named, next(iter(extras), None))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
