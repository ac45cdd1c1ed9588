"""Sizes of GearHead: a frozen record with a parameter formula, and four named presets."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_unified.data.documents.error_codes import NUM_CODE_IDS, NUM_SUBSYSTEMS

__all__ = ["PRESETS", "GearHeadConfig", "Preset", "preset"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GearHeadConfig:
    """Sizes of a GearHead network.

    Attributes:
        vocabulary: Rows of the token table, V. A tokenizer may have fewer tokens, not more.
        positions: The longest text in tokens, P.
        width: Size of the residual stream, D.
        layers: Number of blocks, L.
        heads: Attention heads of a block; they divide the width.
        feed_forward: Size of a block's inner layer, F.
        num_error_codes: Rows of the error-code table, E, or 0 for a plain text model.
        num_diagnoses: Classes of the diagnostic head, C, or 0 for a plain text model.
        dropout: Share of activations dropped at the embeddings and after the two sublayers of each block.
        depth_scaled_init: Divide the initial standard deviation of the two projections into the residual stream by
            sqrt(2 L). The stream's variance then does not grow with depth (Radford et al. 2019, section 2.3).

    Raises:
        ValueError: If a size is not positive, the heads do not divide the width, or dropout is not in [0, 1).
    """

    vocabulary: int
    positions: int
    width: int
    layers: int
    heads: int
    feed_forward: int
    num_error_codes: int = NUM_CODE_IDS
    num_diagnoses: int = NUM_SUBSYSTEMS
    dropout: float = 0.1
    depth_scaled_init: bool = False

    def __post_init__(self) -> None:
        for name in ("vocabulary", "positions", "width", "layers", "heads", "feed_forward"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a size; give 1 or more.")
        if self.width % self.heads:
            valid = ", ".join(str(count) for count in range(1, self.width + 1) if self.width % count == 0)
            raise ValueError(f"heads={self.heads} does not divide width={self.width}; valid head counts: {valid}.")
        if self.num_error_codes not in {0, NUM_CODE_IDS}:
            raise ValueError(
                f"num_error_codes={self.num_error_codes}; it is {NUM_CODE_IDS} (the ids of codes.py) or 0 for none."
            )
        if self.num_diagnoses not in {0, NUM_SUBSYSTEMS}:
            raise ValueError(
                f"num_diagnoses={self.num_diagnoses}; it is {NUM_SUBSYSTEMS} (the subsystems) or 0 for none."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} is not a share; give 0.0 up to, but not including, 1.0.")

    @property
    def parameters(self) -> int:
        """The number of parameters, with a tied head.

        The formula is V·D + P·D + E·D + L·(4D² + 2DF + 9D + F) + 2D + C·(D + 1).

        A block holds attention 4(D² + D), the inner layer 2DF + F + D, and two layer norms 4D.
        """
        D, F = self.width, self.feed_forward
        tables = (self.vocabulary + self.positions + self.num_error_codes) * D
        block = 4 * D * D + 2 * D * F + 9 * D + F
        return tables + self.layers * block + 2 * D + self.num_diagnoses * (D + 1)

    @property
    def is_text_model(self) -> bool:
        """Whether there is no error table and no diagnostic head: the model continues plain text."""
        return not (self.num_error_codes or self.num_diagnoses)

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> "GearHeadConfig":
        """Return the configuration in a checkpoint.

        Raises:
            ValueError: If a key is unknown or missing.
        """
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(f"{dict(fields)!r} does not describe a GearHead: {error}.") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A named configuration with its number of parameters."""

    config: GearHeadConfig
    parameters: int
    purpose: str

    def __post_init__(self) -> None:
        if self.config.parameters != self.parameters:
            raise ValueError(
                f"this preset has {self.config.parameters:,} parameters, not {self.parameters:,} as stated."
            )


PRESETS: dict[str, Preset] = {
    "gearhead-34m": Preset(
        config=GearHeadConfig(vocabulary=32_000, positions=512, width=384, layers=6, heads=6, feed_forward=3072),
        parameters=34_083_904,
        purpose="diagnostics on one small accelerator",
    ),
    "gearhead-118m": Preset(
        config=GearHeadConfig(vocabulary=32_000, positions=2048, width=768, layers=12, heads=12, feed_forward=3072),
        parameters=118_934_080,
        purpose="diagnostics with long histories",
    ),
    "gearhead-small": Preset(
        config=GearHeadConfig(vocabulary=4096, positions=256, width=128, layers=4, heads=4, feed_forward=512),
        parameters=2_638_656,
        purpose="diagnostics on a CPU",
    ),
    "gearhead-text": Preset(
        config=GearHeadConfig(
            vocabulary=512,
            positions=256,
            width=256,
            layers=3,
            heads=4,
            feed_forward=1024,
            num_error_codes=0,
            num_diagnoses=0,
        ),
        parameters=2_566_400,
        purpose="plain text in minutes on two cores",
    ),
}


def preset(name: str, **overrides: Any) -> GearHeadConfig:
    """Return the configuration `name`; given sizes replace the preset's, None keeps them.

    Raises:
        ValueError: If there is no such preset, or the sizes contradict each other.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        raise ValueError(f"there is no preset {name!r};{hint} choose from {', '.join(PRESETS)}.")
    given = {key: value for key, value in overrides.items() if value is not None}
    return replace(PRESETS[name].config, **given)
