"""Small models of the transformers library with random weights.

Each comes with its training batches and its loss rule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import lightning as L
import torch
import transformers as tf
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.modules.plain import Rows

_VOCABULARY, _LENGTH, _CLASSES, _FRAMES = 50, 9, 3, 16
_SIZES = {"vocab_size": _VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {**_SIZES, "intermediate_size": 32, "max_position_embeddings": 16, "num_labels": _CLASSES}
_DECODER = {**_SIZES, **_SPECIAL, "intermediate_size": 32, "num_key_value_heads": 1, "max_position_embeddings": 16}
_SEQ2SEQ = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
_SEQ2SEQ = {**_SEQ2SEQ, "d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": _VOCABULARY}
_IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": _CLASSES, "intermediate_size": 32}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One model class.

    Args:
        model: Its name in transformers.
        config: Arguments of its configuration.
        rows: Makes the row of a batch, from a generator and the row's number.
        rule: The loss rule that holds for its batches; empty without one.
        arguments: Of its forward pass, besides the batch.
    """

    model: str
    config: Mapping[str, object]
    rows: Callable[[torch.Generator, int], dict[str, Tensor]]
    rule: str
    arguments: Mapping[str, object] = field(default_factory=dict)

    def make(self, *, dropout: float, attention: str) -> "Trained":
        """Return a LightningModule around a new model in which every kind of dropout has one rate."""
        kind = getattr(tf, self.model)
        config = kind.config_class(**self.config)
        for part in (config, *(one for one in vars(config).values() if isinstance(one, tf.PretrainedConfig))):
            for name, value in vars(part).items():
                if "drop" in name and isinstance(value, (int, float)) and not isinstance(value, bool):
                    setattr(part, name, dropout)
        torch.manual_seed(0)
        return Trained(kind._from_config(config, attn_implementation=attention), self.arguments)

    def loader(self, *, rows: int = 24) -> DataLoader:
        """Return batches of 8 rows, the same ones every time."""
        generator = torch.Generator().manual_seed(1)
        return DataLoader(Rows([self.rows(generator, row) for row in range(rows)]), batch_size=8)


class Trained(L.LightningModule):
    """A user's module around a model that computes its own loss."""

    def __init__(self, model: torch.nn.Module, arguments: Mapping[str, object]) -> None:
        super().__init__()
        self.model, self.arguments = model, arguments

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch, **self.arguments).loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def _text(generator: torch.Generator, row: int) -> dict[str, Tensor]:
    """Return a text of 3 to 9 tokens, padded on the right."""
    length = 3 + int(torch.randint(_LENGTH - 2, (), generator=generator))
    mask = (torch.arange(_LENGTH) < length).long()
    return {"input_ids": torch.randint(3, _VOCABULARY, (_LENGTH,), generator=generator) * mask, "attention_mask": mask}


def _classified(generator: torch.Generator, row: int) -> dict[str, Tensor]:
    return {**_text(generator, row), "labels": torch.tensor(row % _CLASSES)}


def _language(generator: torch.Generator, row: int) -> dict[str, Tensor]:
    text = _text(generator, row)
    return {**text, "labels": text["input_ids"].masked_fill(text["attention_mask"] == 0, -100)}


def _tagged(generator: torch.Generator, row: int) -> dict[str, Tensor]:
    text = _text(generator, row)
    return {**text, "labels": (text["input_ids"] % _CLASSES).masked_fill(text["attention_mask"] == 0, -100)}


def _masked(generator: torch.Generator, row: int) -> dict[str, Tensor]:
    """Return a text in which some tokens are hidden and scored."""
    text = _text(generator, row)
    hidden = (torch.rand(_LENGTH, generator=generator) < 0.3) & (text["attention_mask"] == 1)
    hidden[row % 3] = True
    labels = text["input_ids"].masked_fill(~hidden, -100)
    return {**text, "input_ids": text["input_ids"].masked_fill(hidden, 3), "labels": labels}


def _asked(generator: torch.Generator, row: int) -> dict[str, Tensor]:
    return {**_text(generator, row), "start_positions": torch.tensor(row % 2), "end_positions": torch.tensor(2)}


def _image(generator: torch.Generator, row: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 8, 8, generator=generator), "labels": torch.tensor(row % _CLASSES)}


def _speech(generator: torch.Generator, row: int) -> dict[str, Tensor]:
    features = torch.randn(8, _FRAMES, generator=generator)
    return {"input_features": features, "labels": _language(generator, row)["labels"]}


def _waveform(generator: torch.Generator, row: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(320, generator=generator), "labels": torch.tensor(row % _CLASSES)}


def _transcribed(generator: torch.Generator, row: int) -> dict[str, Tensor]:
    labels = torch.randint(3, _VOCABULARY, (4,), generator=generator)
    return {"input_values": torch.randn(320, generator=generator), "labels": labels}


def _captioned(generator: torch.Generator, row: int) -> dict[str, Tensor]:
    return {**_text(generator, row), "pixel_values": torch.randn(1, 8, 8, generator=generator)}


_SHIFTED, _SCORED = "scored labels, shifted", "scored labels"
_WAVES = {**_SIZES, "intermediate_size": 32, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4)}
_WAVES = {**_WAVES, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2}
_WAVES = {**_WAVES, "mask_time_prob": 0.0, "classifier_proj_size": 8, "num_labels": _CLASSES, "pad_token_id": 0}
_EXPERTS = {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}
_CLIP_TEXT = {**_SIZES, **_SPECIAL, "intermediate_size": 32, "max_position_embeddings": 16}
_CLIP_VISION = {**_IMAGE, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_WHISPER = {**_SEQ2SEQ, **_SPECIAL, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}

ARCHITECTURES = {
    "GPT-2": Architecture(
        model="GPT2LMHeadModel",
        config={"vocab_size": _VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
        rows=_language,
        rule=_SHIFTED,
    ),
    "BERT": Architecture(model="BertForSequenceClassification", config=_ENCODER, rows=_classified, rule="rows"),
    "RoBERTa": Architecture(
        model="RobertaForTokenClassification", config={**_ENCODER, "pad_token_id": 0}, rows=_tagged, rule=_SCORED
    ),
    "T5": Architecture(
        model="T5ForConditionalGeneration",
        config={"vocab_size": _VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        | {"decoder_start_token_id": 0},
        rows=_language,
        rule=_SCORED,
    ),
    "ViT": Architecture(
        model="ViTForImageClassification",
        config={**_IMAGE, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        rows=_image,
        rule="rows",
    ),
    "Qwen2": Architecture(model="Qwen2ForCausalLM", config=_DECODER, rows=_language, rule=_SHIFTED),
    "Qwen3": Architecture(model="Qwen3ForCausalLM", config={**_DECODER, "head_dim": 8}, rows=_language, rule=_SHIFTED),
    "Llama": Architecture(model="LlamaForCausalLM", config=_DECODER, rows=_language, rule=_SHIFTED),
    "OPT": Architecture(
        model="OPTForCausalLM",
        config={**_SIZES, **_SPECIAL, "ffn_dim": 32, "max_position_embeddings": 16, "word_embed_proj_dim": 16},
        rows=_language,
        rule=_SHIFTED,
    ),
    "Whisper": Architecture(
        model="WhisperForConditionalGeneration",
        config={**_WHISPER, "decoder_start_token_id": 1},
        rows=_speech,
        rule=_SCORED,
    ),
    "DistilBERT": Architecture(
        model="DistilBertForMaskedLM",
        config={"vocab_size": _VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
        rows=_masked,
        rule=_SCORED,
    ),
    "ELECTRA": Architecture(
        model="ElectraForQuestionAnswering",
        config={**_ENCODER, "embedding_size": 16, "num_labels": 2},
        rows=_asked,
        rule="rows",
    ),
    "BART": Architecture(
        model="BartForConditionalGeneration",
        config={**_SEQ2SEQ, **_SPECIAL, "max_position_embeddings": 16, "decoder_start_token_id": 2},
        rows=_language,
        rule=_SCORED,
    ),
    "wav2vec 2.0": Architecture(model="Wav2Vec2ForSequenceClassification", config=_WAVES, rows=_waveform, rule="rows"),
    "wav2vec 2.0 CTC": Architecture(
        model="Wav2Vec2ForCTC", config={**_WAVES, "ctc_loss_reduction": "mean"}, rows=_transcribed, rule="rows"
    ),
    "Mixtral": Architecture(model="MixtralForCausalLM", config=_EXPERTS, rows=_language, rule=_SHIFTED),
    "Mixtral, auxiliary loss": Architecture(
        model="MixtralForCausalLM",
        config={**_EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 1.0},
        rows=_language,
        rule="",
    ),
    "CLIP": Architecture(
        model="CLIPModel",
        config={"text_config": _CLIP_TEXT, "vision_config": _CLIP_VISION, "projection_dim": 8},
        rows=_captioned,
        rule="",
        arguments={"return_loss": True},
    ),
}

SPEC_AUGMENT = Architecture(
    model="Wav2Vec2ForSequenceClassification",
    config={**_WAVES, "mask_time_prob": 0.5, "mask_time_length": 2},
    rows=_waveform,
    rule="rows",
)
"""Masks features by draws of NumPy's, row by row, as wav2vec 2.0 does by default."""

SPLITTABLE = {name: one for name, one in ARCHITECTURES.items() if one.rule}
MIXING = {name: one for name, one in ARCHITECTURES.items() if not one.rule}
