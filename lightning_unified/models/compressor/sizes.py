"""Sizes of the compressor: frozen records with parameter formulas, and named presets.

Tests hold the presets to the numbers of parameters that stand beside them.
"""

from dataclasses import dataclass, replace
from typing import Any

from lightning_unified.models.choices import check_choice
from lightning_unified.models.decoder_sizes import DecoderSizes, check_sizes

__all__ = ["PRESETS", "CompressorConfig", "PolicyConfig", "check_lengths", "preset"]

_PRETRAINED = ("smollm2-135m",)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """Sizes of the policy.

    Attributes:
        positions: The longest text in tokens, T.
        window: Tokens that a decision depends on, c; an even window reaches one token further back than ahead.
        width: Size of a token's hidden vector, W.
        features: Size of the window's output, F.
        position_width: Size of a position's vector, P.
        head: Size of the last hidden layer, H.

    Raises:
        ValueError: If a size is not positive.
    """

    positions: int
    window: int = 8
    width: int = 256
    features: int = 128
    position_width: int = 64
    head: int = 64

    def __post_init__(self) -> None:
        check_sizes(self, "positions", "window", "width", "features", "position_width", "head")

    def parameters(self, embedding_width: int) -> int:
        """Return the number of parameters over embeddings of size D.

        The formula is DW + W + W² + W + cW² + W + WF + F + TP + (F+P)H + H + H + 1.
        """
        D, W, F, H = embedding_width, self.width, self.features, self.head
        window = self.window * W * W + W + W * F + F
        head = (F + self.position_width) * H + H + H + 1
        return D * W + W + W * W + W + window + self.positions * self.position_width + head


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressorConfig:
    """Sizes of one compressor: a policy and the language model that restores dropped tokens.

    Attributes:
        policy: The policy's sizes.
        reader: The language model's sizes; a reader trained from scratch is a GPT-2 decoder with a tied head.
        reading: How the text is restored. "infill": one pass with attention to both sides predicts each dropped token alone.
            "copy": after the compressed text and a separator, the text follows from left to right; each token is predicted from
            the compressed text and all tokens before it, by any causal model.
        pretrained: Name of the pretrained reader; None for a reader trained from scratch.

    Raises:
        ValueError: If the reading is unknown or exceeds the reader's positions.
    """

    policy: PolicyConfig
    reader: DecoderSizes
    reading: str = "infill"
    pretrained: str | None = None

    def __post_init__(self) -> None:
        check_choice("reading", self.reading, ("infill", "copy"))
        if self.pretrained is not None and self.pretrained not in _PRETRAINED:
            raise ValueError(
                f"pretrained={self.pretrained!r} is not offered; choose from {', '.join(_PRETRAINED)}, or null."
            )
        if self.pretrained is not None and self.reading == "infill":
            raise ValueError(f"{self.pretrained} reads from left to right only; use reading=copy.")
        if self.reader.positions < 2 * self.policy.positions:
            raise ValueError(
                f"texts of {self.policy.positions} tokens and their continuation need {2 * self.policy.positions} positions; the "
                f"reader has {self.reader.positions}. Lower text_length or raise positions."
            )


PRESETS: dict[str, CompressorConfig] = {
    # tests: 7,441 parameters of the policy, 28,800 of the reader (without the mask and separator embeddings, as below)
    "compressor-tiny": CompressorConfig(
        policy=PolicyConfig(positions=32, window=4, width=32, features=16, position_width=8, head=16),
        reader=DecoderSizes(vocabulary=300, positions=64, width=32, layers=2, heads=4, feed_forward=64),
    ),
    # minutes on two cores: 179,777 and 560,640
    "compressor-small": CompressorConfig(
        policy=PolicyConfig(positions=128, window=8, width=128, features=64, position_width=16, head=64),
        reader=DecoderSizes(vocabulary=1024, positions=256, width=128, layers=2, heads=4, feed_forward=512),
        reading="copy",
    ),
    # GPT-2 small beside a policy of 0.9 million, on one accelerator: 865,281 and 124,439,808
    "compressor-125m": CompressorConfig(
        policy=PolicyConfig(positions=512),
        reader=DecoderSizes(vocabulary=50_257, positions=1024, width=768, layers=12, heads=12, feed_forward=3072),
        reading="copy",
    ),
    # a pretrained reader of English: 816,129 and 134,515,008
    "compressor-smollm2": CompressorConfig(
        policy=PolicyConfig(positions=512),
        reader=DecoderSizes(vocabulary=49_152, positions=8192, width=576, layers=30, heads=9, feed_forward=1536),
        reading="copy",
        pretrained="smollm2-135m",
    ),
}


def preset(name: str, **overrides: Any) -> CompressorConfig:
    """Return the configuration `name`; given sizes replace the preset's, None keeps them.

    Args:
        name: A key of `PRESETS`.
        **overrides: Fields of `CompressorConfig` and `DecoderSizes`; `text_length` and `window` are the policy's.

    Raises:
        ValueError: If there is no such preset, or the sizes contradict each other.
    """
    check_choice("preset", name, PRESETS)
    given = {key: value for key, value in overrides.items() if value is not None}
    config = PRESETS[name]
    renamed = {"text_length": "positions", "window": "window"}
    of_policy = {field: given.pop(key) for key, field in renamed.items() if key in given}
    own = {"reading": given.pop("reading")} if "reading" in given else {}
    if config.pretrained is not None and given:
        raise ValueError(f"{', '.join(given)}: the sizes of {config.pretrained} are fixed by its training.")
    return replace(config, policy=replace(config.policy, **of_policy), reader=replace(config.reader, **given), **own)


def check_lengths(config: CompressorConfig, *, target: str, text: int | None, continuation: int | None) -> None:
    """Raise for data that does not fit the positions, before the first step.

    Args:
        config: The model's sizes.
        target: "restore", or "predict", which needs continuations.
        text: The data's longest text in tokens; None if unknown, as the next.
        continuation: Tokens of the data's continuations, 0 for none.

    Raises:
        ValueError: If the texts exceed the policy's positions, or lack the continuation to predict, or both exceed the reader's.
    """
    longest, positions = config.policy.positions, config.reader.positions
    if text is not None and text > longest:
        raise ValueError(
            f"data.text_length={text}, and the policy has positions for {longest} tokens; lower it, or set "
            f"model.text_length={text} (the reader then needs {2 * text} positions and has {positions}: model.positions)."
        )
    if target != "predict" or continuation is None:
        return
    if not continuation:
        raise ValueError(
            "model.target=predict scores the continuation of each text; set data.continuation_length above 0."
        )
    if positions < (text or 0) + continuation:
        raise ValueError(
            f"data.text_length={text} and data.continuation_length={continuation} need {(text or 0) + continuation} positions, "
            f"and the reader has {positions}; lower them or raise model.positions."
        )
