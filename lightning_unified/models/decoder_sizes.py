"""Sizes and parameter count of a pre-norm decoder with learned positions and a tied head."""

from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["DecoderSizes", "check_parameters", "check_sizes"]


def check_sizes(config: Any, *names: str) -> None:
    """Raise a ValueError if one of a configuration's sizes is not positive."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)} is not a size; give 1 or more.")


def check_parameters(network: nn.Module, *, stated: int) -> None:
    """Raise a RuntimeError unless a network has the number of parameters that is stated."""
    built = sum(parameter.numel() for parameter in network.parameters())
    if built != stated:
        raise RuntimeError(f"built {built:,} parameters where the configuration states {stated:,}.")


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """Sizes of a decoder.

    Attributes:
        vocabulary: Rows of the token table, V. A tokenizer may have fewer tokens, not more.
        positions: The longest sequence in tokens, P.
        width: Size of the residual stream, D.
        layers: Number of blocks, L.
        heads: Attention heads of a block; they divide the width.
        feed_forward: Size of a block's inner layer, F.
        dropout: Share of activations dropped at the embeddings and after the two sublayers of each block.

    Raises:
        ValueError: If a size is not positive, the heads do not divide the width, or dropout is not in [0, 1).
    """

    vocabulary: int
    positions: int
    width: int
    layers: int
    heads: int
    feed_forward: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "positions", "width", "layers", "heads", "feed_forward")
        if self.width % self.heads:
            valid = ", ".join(str(count) for count in range(1, self.width + 1) if self.width % count == 0)
            raise ValueError(f"heads={self.heads} does not divide width={self.width}; valid head counts: {valid}.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} is not a share; give 0.0 up to, but not including, 1.0.")

    @property
    def parameters(self) -> int:
        """The number of parameters: V·D + P·D + L·(4D² + 2DF + 9D + F) + 2D, the head being tied.

        A block holds attention 4(D² + D), the inner layer 2DF + F + D, and two layer norms 4D.
        """
        D, F = self.width, self.feed_forward
        return (self.vocabulary + self.positions) * D + self.layers * (4 * D * D + 2 * D * F + 9 * D + F) + 2 * D
