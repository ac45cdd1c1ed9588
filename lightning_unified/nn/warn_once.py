"""Log a warning the first time only."""

import logging

__all__ = ["warn_once"]

log = logging.getLogger("lightning_unified")


def warn_once(said: set[str], text: str) -> None:
    """Log `text` as a warning, unless it is in `said`; add it there."""
    if text not in said:
        said.add(text)
        log.warning("%s", text)
