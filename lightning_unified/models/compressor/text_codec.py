"""The codec with its tokenizer as a LightningModule.

Evaluation and compression use it, and checkpoints hold it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning.pytorch import LightningModule
from tokenizers import Tokenizer
from torch import Tensor, nn
from typing_extensions import override

from lightning_unified.models.compressor.network.codec import Codec
from lightning_unified.models.compressor.sizes import CompressorConfig
from lightning_unified.models.plain_checkpoint import check_same_sizes, check_vocabulary

__all__ = ["TextCodec", "TextTokenizer"]


class TextTokenizer:
    """A tokenizer that adds no special tokens and reads their names in a text as characters.

    Args:
        backend: The tokenizer of the `tokenizers` library; it is copied.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._text = backend.to_str()
        self._backend = Tokenizer.from_str(self._text)
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True

    @property
    def vocabulary(self) -> dict[str, int]:
        """The tokens with their ids."""
        return self._backend.get_vocab()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextTokenizer) and self.vocabulary == other.vocabulary

    def __hash__(self) -> int:
        return hash(self._text)

    def to_str(self) -> str:
        """Return the tokenizer as JSON."""
        return self._text


class TextCodec(LightningModule):
    """A policy that chooses the tokens to keep, a reader of these tokens, and their tokenizer.

    `trained_steps` is the number of training steps of the loaded checkpoint, else 0. `trained_length` is the text length in
    training, None if unknown.

    Args:
        config: The sizes.
        recompute: Activation checkpointing of each block.
        load_pretrained: Whether to load a pretrained reader's weights; False if a checkpoint follows.
        pretrained: Source of GPT-2's weights for a reader of its architecture; None for none.

    Raises:
        ValueError: If the sizes come with a pretrained reader of their own.
    """

    trained_steps: int = 0
    trained_length: int | None = None

    def __init__(
        self, config: CompressorConfig, *, recompute: bool, load_pretrained: bool, pretrained: str | None
    ) -> None:
        super().__init__()
        if config.pretrained is not None and pretrained is not None:
            raise ValueError(
                f"model.pretrained={pretrained}: this preset reads with {config.pretrained}; take model=compressor-125m for GPT-2's weights."
            )
        self.config = config
        self.codec = Codec(config, recompute=recompute, load_pretrained=load_pretrained, gpt2=pretrained)
        self._pretrained = config.pretrained or pretrained
        self.tokenizer: TextTokenizer | None = None

    @property
    def recompute(self) -> bool:
        """Whether each block recomputes its activations; a strategy may set it before the run."""
        return self.codec.reader.recompute

    @recompute.setter
    def recompute(self, value: bool) -> None:
        self.codec.reader.recompute = bool(value)

    @property
    def loss_chunk_rows(self) -> int | None:
        """Tokens of a chunk of the loss; None chooses."""
        return self.codec.loss_chunk_rows

    @loss_chunk_rows.setter
    def loss_chunk_rows(self, value: int | None) -> None:
        self.codec.loss_chunk_rows = value

    def recompute_blocks(self) -> list[nn.Module]:
        """Return the reader's blocks, for activation checkpointing of some of them."""
        return self.codec.reader.layers()

    @property
    def text_length(self) -> int:
        """The longest text with trained positions; before training, with positions at all."""
        return min(self.trained_length or self.config.policy.positions, self.config.policy.positions)

    def attach_tokenizer(self, tokenizer: Tokenizer | TextTokenizer) -> None:
        """Set this model's tokenizer; with fewer tokens than the vocabulary, some rows stay unused.

        Raises:
            ValueError: If it has more tokens than the model has rows, or the model was trained with another one.
        """
        given = tokenizer if isinstance(tokenizer, TextTokenizer) else TextTokenizer(tokenizer)
        rows, pretrained = self.config.reader.vocabulary, self._pretrained
        if pretrained is not None and len(given.vocabulary) < rows:
            raise ValueError(
                f"{pretrained} has {rows:,} tokens of its own, the tokenizer given {len(given.vocabulary):,}; set "
                f"data.pretrained={pretrained}."
            )
        trained = None if self.tokenizer is None else self.tokenizer.vocabulary
        check_vocabulary(given.vocabulary, rows=rows, trained=trained)
        self.tokenizer = given

    def keep_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the log-odds (B, T) of keeping each token of `ids` (B, T).

        `mask` (B, T) is False at pads.
        """
        return self.codec(ids, mask)

    def reconstruct(self, ids: Tensor, keep: Tensor, mask: Tensor) -> Tensor:
        """Return the logits (B, T, V) of every original token, given the kept ones.

        Shapes:
            ids (B, T); keep (B, T), bool or gates in [0, 1]; mask (B, T) bool.
        """
        embeddings = self.codec.reader.embed(ids)
        return self.codec.scores(self.codec.restored(embeddings, gates=keep.to(embeddings.dtype), mask=mask))

    def next_logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the reader's next-token logits (B, T, V) as a language model of the whole text."""
        return self.codec.next_logits(ids, mask)

    def continue_logits(
        self, ids: Tensor, keep: Tensor, mask: Tensor, continuation: Tensor, continuation_mask: Tensor
    ) -> Tensor:
        """Return the logits (B, U, V) of the continuation.

        They are predicted from the kept tokens and the tokens before it. The reader gets the kept tokens (`keep` above 0.5)
        side by side and no slots for the others, so it reads fewer slots.

        Shapes:
            ids, keep, mask (B, T); continuation, continuation_mask (B, U).
        """
        embeddings = self.codec.reader.embed(ids)
        hidden = self.codec.continued(
            embeddings, real=mask & (keep > 0.5), continuation=continuation, continuation_mask=continuation_mask
        )
        return self.codec.scores(hidden)

    @override
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return `keep_logits(ids, mask)`."""
        return self.keep_logits(ids, mask)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the sizes and the tokenizer beside the weights, so that compressing needs one file."""
        text = None if self.tokenizer is None else self.tokenizer.to_str()
        sizes = {"config": asdict(self.config), "trained_length": self.trained_length}
        checkpoint["compressor"] = {**sizes, "tokenizer": text}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the tokenizer.

        Raises:
            ValueError: If the checkpoint belongs to another model, or its sizes or tokenizer differ.
        """
        saved: Mapping[str, Any] | None = checkpoint.get("compressor")
        if saved is None:
            raise ValueError("this checkpoint is not one of Compressor: it holds no sizes and no tokenizer.")
        check_same_sizes(saved["config"], asdict(self.config))
        self.trained_steps = int(checkpoint.get("global_step", 0))
        self.trained_length = self.trained_length or saved["trained_length"]
        if saved["tokenizer"] is not None:
            given, self.tokenizer = self.tokenizer, TextTokenizer(Tokenizer.from_str(saved["tokenizer"]))
            if given is not None:
                self.attach_tokenizer(given)
