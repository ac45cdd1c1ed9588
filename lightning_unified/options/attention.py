"""The attention option: torch's attention, or exact attention in chunks of queries."""

import logging
from typing import Any, Literal

import lightning as L

from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.attention import ChunkedAttention, attends_by_itself
from lightning_unified.nn.compiled import compiled_parts

__all__ = ["AskedAttention", "AttentionOption", "attention_choices", "check_attention"]

log = logging.getLogger("lightning_unified")

AskedAttention = Literal["auto", "chunked", "torch"]

_ASKED = ("auto", "chunked", "torch")
_SAVES_SCORES = ("mps",)  # backends whose attention with gradients saves B·H·L·S probabilities
_NAMED = 3


class AttentionOption:
    """Attention in chunks of queries for one module, from construction until `undo`.

    It replaces torch's `scaled_dot_product_attention` in the whole process (`lightning_unified.nn.attention`). Modules that compute attention
    weights themselves are named in one warning.

    Raises:
        ConfigurationError: If the module holds compiled modules, whose graphs contain torch's attention.
    """

    def __init__(self, module: L.LightningModule) -> None:
        compiled = compiled_parts(module)
        if compiled:
            raise ConfigurationError(
                f"attention=chunked: {type(module).__name__} holds compiled modules ({_listed(list(compiled))}), whose graphs contain torch's "
                "attention; set memory.attention=torch, or leave compilation out."
            )
        by_itself = attends_by_itself(module)
        if by_itself:
            log.warning(
                "memory.attention=chunked does not reach modules that compute attention weights themselves: %s. Their scores stay in memory. "
                'Use attn_implementation="sdpa", or need_weights=False.',
                _listed(by_itself),
            )
        self._kind = type(module).__name__
        self._attention = ChunkedAttention(module)

    def undo(self, *, trained: bool = False) -> None:
        """Restore torch's attention; a second call does nothing.

        `trained` says whether a step has run.
        """
        self._attention.remove()
        if trained and not self._attention.calls:
            log.warning(
                "memory.attention=chunked changed nothing: %s never called scaled_dot_product_attention with gradients.",
                self._kind,
            )


def attention_choices(
    module: L.LightningModule, asked: AskedAttention, *, backend: str
) -> tuple[Literal["chunked"] | None, ...]:
    """Return the kinds of attention that a plan may compare on a backend; None is torch's.

    `"auto"` leaves it open on MPS, where training saves the probabilities, and keeps torch's attention elsewhere. Modules with compiled
    parts keep it too.
    """
    if asked == "chunked":
        return ("chunked",)
    if asked == "torch" or backend not in _SAVES_SCORES or compiled_parts(module):
        return (None,)
    return (None, "chunked")


def check_attention(asked: Any) -> None:
    """Raise `ConfigurationError` if `asked` is not `"auto"`, `"chunked"` or `"torch"`."""
    if asked not in _ASKED:
        raise ConfigurationError(f'attention={asked!r}: give "auto", "chunked" or "torch".')


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(name or "the module itself" for name in names[:_NAMED]) + more
