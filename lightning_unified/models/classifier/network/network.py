"""The classifier's network: an encoder of transformers and its head."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_unified.models.classifier.network import encoder as encoders
from lightning_unified.models.classifier.network.lora import adapt
from lightning_unified.models.classifier.presets import preset as preset_named
from lightning_unified.models.pretrained.architecture import architecture_of, blocks_of, read_architecture
from lightning_unified.models.pretrained.source import find_model

__all__ = ["Network", "build_network"]

# these take a 4-dimensional mask directly; with a 2-dimensional one, the host first reads whether there is a pad
_TAKE_MASKS = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "electra"})


class Network(nn.Module):
    """A sequence classifier.

    Args:
        preset: A name in `presets.PRESETS`.
        encoder: A folder, an installed package or a hub id, in place of the preset's.
        architecture: A transformers configuration, in place of the encoder's own.
        load_pretrained: Whether to read the encoder's weights; never on the meta device.
        labels: Number of labels.
        dropout: Dropout in place of the encoder's own.
        attention: transformers' name of the attention kernel.

    Raises:
        ValueError: If the preset's encoder has another number of parameters than stated.
    """

    def __init__(
        self,
        *,
        preset: str,
        encoder: str | None,
        architecture: Mapping[str, Any] | None,
        load_pretrained: bool,
        labels: int,
        dropout: float | None,
        attention: str,
    ) -> None:
        super().__init__()
        chosen = preset_named(preset)
        own = encoder is None and architecture is None
        source = chosen.encoder if own else encoder
        folder = (
            None
            if source is None or (architecture is not None and not load_pretrained)
            else find_model(source, argument="encoder")
        )
        sizes = architecture or (read_architecture(folder) if folder else chosen.architecture)
        assert sizes is not None
        options: dict[str, Any] = {"labels": labels, "attention": attention, "dropout": dropout}
        self.is_pretrained = folder is not None and load_pretrained
        if folder is None or not load_pretrained or torch.empty(0).is_meta:
            self.model: Any = encoders.build(sizes, **options)
        else:
            self.model = encoders.load(folder, sizes, **options)
        count = sum(parameter.numel() for parameter in encoders.base_of(self.model).parameters())
        if own and count != chosen.parameters:
            raise ValueError(f"the encoder of {preset} has {count:,} parameters, not {chosen.parameters:,} as stated.")

    @property
    def labels(self) -> int:
        """Number of labels."""
        return self.model.config.num_labels

    @property
    def vocabulary(self) -> int:
        """Rows of the token table."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def positions(self) -> int | None:
        """The longest text in tokens; None without a limit."""
        config = self.model.config
        longest = getattr(config, "max_position_embeddings", None)
        # RoBERTa's positions start after its padding id
        return longest - config.pad_token_id - 1 if longest and "roberta" in config.model_type else longest

    def blocks(self) -> list[nn.Module]:
        """Return the encoder's blocks in the order in which they run."""
        return blocks_of(encoders.base_of(self.model))

    def architecture(self) -> dict[str, Any]:
        """Return the configuration as plain data."""
        return architecture_of(self.model)

    def resize_head(self, labels: int) -> None:
        """Replace the head by a new one with `labels` outputs."""
        encoders.resize_head(self.model, labels)

    @override
    def forward(
        self, input_ids: Tensor | None, attention_mask: Tensor | None = None, embeddings: Tensor | None = None
    ) -> Tensor:
        """Return the logits (B, C) of texts (B, T).

        Embeddings (B, T, D) may replace the ids.
        """
        given = input_ids if embeddings is None else embeddings
        assert given is not None
        B, T = given.shape[:2]
        if attention_mask is None and self.model.config.model_type not in _TAKE_MASKS:
            attention_mask = torch.ones(B, T, dtype=torch.int64, device=given.device)
        elif attention_mask is not None and self._takes_masks:
            attention_mask = attention_mask.bool()[:, None, None, :].expand(B, 1, T, T)
        if embeddings is not None:
            return self.model(inputs_embeds=embeddings, attention_mask=attention_mask).logits
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits

    @property
    def _takes_masks(self) -> bool:
        config = self.model.config
        return config.model_type in _TAKE_MASKS and config._attn_implementation == "sdpa"


def build_network(hparams: Mapping[str, Any]) -> Network:
    """Return the network for the hyperparameters of `TextClassifier`.

    It has low-rank adapters if they ask for some.
    """
    names = ("preset", "encoder", "architecture", "load_pretrained", "dropout", "attention")
    network = Network(**{name: hparams[name] for name in names}, labels=hparams["labels"] or 2)
    if hparams["lora_rank"] is not None:
        adapt(network.model, **{name: hparams[f"lora_{name}"] for name in ("rank", "alpha", "dropout", "targets")})
    return network
