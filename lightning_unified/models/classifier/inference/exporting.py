"""Export a trained classifier as a folder for transformers, and as a torch-only program."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_unified.models.classifier.data.tokens.bpe_codes import BEYOND, write_bpe_codes
from lightning_unified.models.classifier.inference.classify import encoder_of, text_length_of
from lightning_unified.models.classifier.module import TextClassifier
from lightning_unified.models.classifier.network.lora import merged
from lightning_unified.models.pretrained.gguf import without_progress_bars

__all__ = ["Exported", "export"]

_TOLERANCE = 1e-4  # tolerance of probabilities: other kernels, float32
_SHAPES = ((1, 3), (5, 17))  # shapes that the program was not traced with


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Result of `export`.

    Attributes:
        folder: The folder.
        files: Names of its files.
        program: Name of the `torch.export` program; None if it was not requested.
        largest_difference: Largest difference from the model's probabilities, over shapes it was not traced with.
    """

    folder: Path
    files: list[str]
    program: str | None
    largest_difference: float | None


class _Probabilities(nn.Module):
    def __init__(self, model: nn.Module, temperature: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("temperature", temperature.detach().clone())

    @override
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return (logits.float() / self.temperature).softmax(-1)


def export(module: TextClassifier, folder: str | Path, *, program: bool = True) -> Exported:
    """Write a classifier for use without this library, with merged adapters.

    `AutoModelForSequenceClassification.from_pretrained` and `AutoTokenizer` read `config.json` (with label names),
    `model.safetensors` and the tokenizer. `classifier.json` has the label names, the temperature to divide logits by, and the
    length at which texts are truncated. `program.pt2` takes `input_ids` and `attention_mask` (B, T) of any B and T and
    returns probabilities, scaled already; it is checked against the model before it is kept.

    Args:
        module: A trained classifier; it is not changed.
        folder: Target folder; created if missing.
        program: Whether to write the program.

    Raises:
        RuntimeError: If it has no tokenizer, or the program gives other probabilities than the model.
    """
    encoder, longest = encoder_of(module), text_length_of(module)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model = _plain_copy(module)
    with without_progress_bars():
        model.save_pretrained(folder)
    _save_tokenizer(encoder, longest, folder)
    temperature = module.temperature.detach().cpu()
    facts = {"label_names": module.label_names, "temperature": float(temperature), "text_length": longest}
    (folder / "classifier.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    difference = None
    if program:
        difference = _save_program(_Probabilities(model, temperature).eval(), folder / "program.pt2", longest)
    return Exported(
        folder=folder,
        files=sorted(file.name for file in folder.iterdir()),
        program="program.pt2" if program else None,
        largest_difference=difference,
    )


def _plain_copy(module: TextClassifier) -> Any:
    """Return a copy of the network as transformers has it, merged, on the CPU."""
    hparams = dict(module.hparams)
    hparams |= {
        "architecture": module.network.architecture(),
        "load_pretrained": False,
        "labels": module.network.labels,
    }
    copy = TextClassifier(**{**hparams, "encoder": None, "recompute": False})
    own = copy.network.state_dict()
    for name, value in module.network.state_dict().items():  # one by one: no second copy on the way to the CPU
        own[name].copy_(value)
    model = merged(copy.network.model).eval().float()
    model.config.id2label = dict(enumerate(module.label_names))
    model.config.label2id = {name: index for index, name in enumerate(module.label_names)}
    return model


def _save_tokenizer(encoder: Any, longest: int, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    if encoder.backend.token_to_id(BEYOND) is not None:
        write_bpe_codes(encoder.backend, folder, max_length=longest)
        return
    PreTrainedTokenizerFast(
        tokenizer_object=encoder.backend,
        model_max_length=longest,
        model_input_names=["input_ids", "attention_mask"],
        **encoder.special,
    ).save_pretrained(folder)


def _save_program(model: nn.Module, path: Path, longest: int) -> float:
    batch, length = torch.export.Dim("batch", min=1, max=65536), torch.export.Dim("length", min=2, max=longest)
    dynamic = {"input_ids": {0: batch, 1: length}, "attention_mask": {0: batch, 1: length}}
    with torch.no_grad():
        traced = torch.export.export(model, _example(2, 8), dynamic_shapes=dynamic)
        torch.export.save(traced, path)
        again = torch.export.load(path).module()
        shapes = [(rows, min(columns, longest)) for rows, columns in _SHAPES]
        difference = max(
            float((again(*given) - model(*given)).abs().max()) for given in (_example(*shape) for shape in shapes)
        )
    if not difference <= _TOLERANCE:
        path.unlink()
        raise RuntimeError(
            f"the exported program's probabilities differ from the model's by up to {difference:.2g}, more than {_TOLERANCE:g}; it was "
            "not kept. The rest of the folder is good; export without the program."
        )
    return difference


def _example(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return ids in any vocabulary, and a mask whose last row is half padding."""
    ids = torch.arange(rows * columns).view(rows, columns) % 61 + 1
    mask = torch.ones(rows, columns, dtype=torch.int64)
    mask[-1, (columns + 1) // 2 :] = 0
    return ids, mask
