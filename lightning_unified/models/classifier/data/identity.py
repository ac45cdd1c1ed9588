"""Identity of a classifier's data: label names, tokenizer and batch lengths."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_unified.models.classifier.data.reading.format import FileFormat
from lightning_unified.models.classifier.data.tokens.text_encoder import TextEncoder
from lightning_unified.models.classifier.network.network import Network

__all__ = ["Identity"]


class Identity:
    """Label names, tokenizer and lengths of a classifier.

    They are empty until data or a checkpoint sets them, then fixed.

    Attributes:
        label_names: Names in the order of the logits; empty until set.
        encoder: The tokenizer; None until set.
        lengths: Lengths to which rows are padded, ascending.
        text_length: Length in tokens at which longer texts are truncated; None until set.
        file_format: Columns and encoding of the user's files in training.
    """

    def __init__(self) -> None:
        self.label_names: list[str] = []
        self.encoder: TextEncoder | None = None
        self.lengths: tuple[int, ...] = ()
        self.text_length: int | None = None
        self.file_format = FileFormat()

    def take(self, data: Any, network: Network, *, labels: int | None) -> None:
        """Take names, tokenizer and lengths from a data module; give the network a fitting head.

        Args:
            data: Any data module; its `label_names`, `tokenizer`, `padded_lengths`, `text_length` and `file_format` are optional.
            network: An untrained network if the number of labels differs from its own.
            labels: Number of labels that the user asked for; None for the data's.

        Raises:
            ValueError: If they contradict the known ones, or do not fit the network.
        """
        if network.is_pretrained and getattr(data, "learns_tokenizer", False):
            raise ValueError(
                "data.pretrained=null learns a tokenizer from the texts, and the encoder has pretrained weights for the tokens of its own "
                "tokenizer; set data.pretrained to the encoder's name or folder."
            )
        names = getattr(data, "label_names", None)
        if names:
            self._take_names([str(name) for name in names])
        tokenizer = getattr(data, "tokenizer", None)
        if tokenizer is not None:
            self._take_encoder(TextEncoder(tokenizer), network.vocabulary)
        lengths: Sequence[int] = getattr(data, "padded_lengths", None) or ()
        longest = getattr(data, "text_length", None) or max(lengths, default=None)
        if network.positions is not None and longest is not None and longest > network.positions:
            raise ValueError(
                f"the data's texts have up to {longest} tokens, and the encoder has positions for {network.positions}; set "
                f"data.text_length={network.positions}."
            )
        self.lengths = tuple(sorted(int(length) for length in lengths)) or self.lengths
        self.text_length = longest or self.text_length
        self.file_format = getattr(data, "file_format", self.file_format)
        found = self.label_names
        if found and len(found) != network.labels:
            if labels is not None:
                raise ValueError(
                    f"model.labels={labels}, and the data has {len(found)}: {', '.join(found[:8])}{' …' if len(found) > 8 else ''}. "
                    "Leave model.labels out, or give the data that has as many."
                )
            network.resize_head(len(found))

    def state(self) -> dict[str, Any]:
        """Return the identity as plain data."""
        text = None if self.encoder is None else self.encoder.to_str()
        lengths = {"lengths": list(self.lengths), "text_length": self.text_length}
        form = {"file_format": self.file_format.state()}
        return {"label_names": self.label_names, "tokenizer": text, **lengths, **form}

    def restore(self, saved: Mapping[str, Any] | None, network: Network) -> None:
        """Restore the result of `state`, and give the network a head for its labels.

        Raises:
            ValueError: If there is no such result, or known labels or a known tokenizer differ.
        """
        if saved is None:
            raise ValueError("this checkpoint is not one of TextClassifier: it holds no label names and no tokenizer.")
        names = saved["label_names"]
        if len(names) != network.labels:
            if self.label_names:
                raise ValueError(
                    f"the checkpoint has {len(names)} labels ({', '.join(names[:8])}), the data {network.labels}; give the data it was "
                    "trained on."
                )
            network.resize_head(len(names))
        self._take_names(list(names))
        if saved["tokenizer"] is not None:
            encoder = TextEncoder.from_str(saved["tokenizer"])
            self._take_encoder(encoder, len(encoder))
        self.lengths = self.lengths or tuple(saved["lengths"])
        self.text_length = self.text_length or saved["text_length"]
        self.file_format = FileFormat(**saved["file_format"])

    def _take_names(self, names: list[str]) -> None:
        if self.label_names and self.label_names != names:
            raise ValueError(
                f"this model tells {', '.join(self.label_names[:8])} apart, in this order, and is given labels "
                f"{', '.join(names[:8])}; give the data it was trained on."
            )
        self.label_names = names

    def _take_encoder(self, given: TextEncoder, vocabulary: int) -> None:
        if len(given) > vocabulary:
            raise ValueError(
                f"the tokenizer has {len(given):,} tokens, the encoder {vocabulary:,}: it is another model's. Give the data the "
                "tokenizer of this encoder."
            )
        if self.encoder is not None and self.encoder != given:
            raise ValueError(
                f"this model was trained with another tokenizer ({len(self.encoder):,} tokens) than the one given ({len(given):,} "
                "tokens); its weights mean nothing under the new one. Use the tokenizer of the checkpoint."
            )
        self.encoder = given
