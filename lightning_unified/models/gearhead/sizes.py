"""Sizes of GearHead: a frozen record with a parameter formula, and named presets.

Tests hold the presets to the numbers of parameters that stand beside them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from lightning_unified.data.documents.error_codes import NUM_CODE_IDS, NUM_SUBSYSTEMS
from lightning_unified.models.choices import check_choice
from lightning_unified.models.decoder_sizes import DecoderSizes

__all__ = ["PRESETS", "GearHeadConfig", "preset"]


@dataclass(frozen=True, kw_only=True)
class GearHeadConfig(DecoderSizes):
    """Sizes of a GearHead network; `DecoderSizes` documents the inherited attributes.

    Attributes:
        num_error_codes: Rows of the error-code table, E, or 0 for a plain text model.
        num_diagnoses: Classes of the diagnostic head, C, or 0 for a plain text model.
        depth_scaled_init: Divide the initial standard deviation of the two projections into the residual stream by
            sqrt(2 L). The stream's variance then does not grow with depth (Radford et al. 2019, section 2.3).

    Raises:
        ValueError: As for `DecoderSizes`, or if a number of codes or diagnoses is neither 0 nor that of the data.
    """

    num_error_codes: int = NUM_CODE_IDS
    num_diagnoses: int = NUM_SUBSYSTEMS
    dropout: float = 0.1
    depth_scaled_init: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_error_codes not in {0, NUM_CODE_IDS}:
            raise ValueError(
                f"num_error_codes={self.num_error_codes}; it is {NUM_CODE_IDS} (the ids of codes.py) or 0 for none."
            )
        if self.num_diagnoses not in {0, NUM_SUBSYSTEMS}:
            raise ValueError(
                f"num_diagnoses={self.num_diagnoses}; it is {NUM_SUBSYSTEMS} (the subsystems) or 0 for none."
            )

    @property
    @override
    def parameters(self) -> int:
        """The number of parameters: that of `DecoderSizes` + E·D + C·(D + 1)."""
        return super().parameters + self.num_error_codes * self.width + self.num_diagnoses * (self.width + 1)

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


PRESETS: dict[str, GearHeadConfig] = {
    # diagnostics on one small accelerator: 34,083,904 parameters
    "gearhead-34m": GearHeadConfig(vocabulary=32_000, positions=512, width=384, layers=6, heads=6, feed_forward=3072),
    # diagnostics with long histories: 118,934,080
    "gearhead-118m": GearHeadConfig(
        vocabulary=32_000, positions=2048, width=768, layers=12, heads=12, feed_forward=3072
    ),
    # diagnostics on a CPU: 2,638,656
    "gearhead-small": GearHeadConfig(vocabulary=4096, positions=256, width=128, layers=4, heads=4, feed_forward=512),
    # plain text in minutes on two cores: 2,566,400
    "gearhead-text": GearHeadConfig(
        vocabulary=512,
        positions=256,
        width=256,
        layers=3,
        heads=4,
        feed_forward=1024,
        num_error_codes=0,
        num_diagnoses=0,
    ),
}


def preset(name: str, **overrides: Any) -> GearHeadConfig:
    """Return the configuration `name`; given sizes replace the preset's, None keeps them.

    Raises:
        ValueError: If there is no such preset, or the sizes contradict each other.
    """
    check_choice("preset", name, PRESETS)
    given = {key: value for key, value in overrides.items() if value is not None}
    return replace(PRESETS[name], **given)
