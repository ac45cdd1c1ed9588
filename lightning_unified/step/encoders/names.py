"""The submodules that `MicroBatchRules(encoders=…)` names."""

import difflib
from collections.abc import Sequence

from torch import nn

from lightning_unified.errors import ConfigurationError

__all__ = ["find_encoders"]


def find_encoders(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Return the submodules of `module` with these names, each once.

    Raises:
        ConfigurationError: If a name is no submodule's; the message names the nearest ones.
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
