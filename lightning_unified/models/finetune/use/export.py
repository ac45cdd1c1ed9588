"""Write a fine-tuned model as safetensors: merged, or its adapters alone.

transformers and mlx-lm read the merged model, peft the adapters.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_unified.models.causal_lm.presets import Preset
from lightning_unified.models.causal_lm.weights import DTYPES
from lightning_unified.models.choices import check_choice
from lightning_unified.models.finetune.module import Finetune
from lightning_unified.models.finetune.presets import PRESETS
from lightning_unified.models.pretrained.adapters import adapter_layers
from lightning_unified.models.pretrained.chat import ChatTokenizer
from lightning_unified.models.pretrained.gguf import without_progress_bars

__all__ = ["merged", "write_adapters", "write_merged"]


def write_merged(module: Finetune, folder: Path, *, dtype: str | None = None) -> list[str]:
    """Write the model with merged adapters and its tokenizer; return the names of the files.

    `transformers.AutoModelForCausalLM.from_pretrained(folder)` and `mlx_lm.load(folder)` read the folder; so does this package, as
    `pretrained=folder`. The module keeps its adapters.

    Args:
        module: The model with its tokenizer.
        folder: A new or empty folder.
        dtype: Dtype of the weights in the file, "float32" or "bfloat16"; None for that of the training.

    Raises:
        FileExistsError: If the folder holds files.
        ValueError: If the dtype is not offered.
    """
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)
    _check_empty(folder)
    model = merged(module.policy)
    if dtype is not None:
        model = model.to(DTYPES[dtype])
    with without_progress_bars():
        model.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    _add_older_names(folder / "config.json")
    _write_tokenizer(module.chat, folder)
    return sorted(file.name for file in folder.iterdir())


def write_adapters(module: Finetune, folder: Path) -> list[str]:
    """Write the adapters alone, as peft does; return the names of the files.

    `peft.PeftModel.from_pretrained(base, folder)` reads them, and GRPO may continue their training.

    Raises:
        FileExistsError: If the folder holds files.
        ValueError: If the model has no adapters.
    """
    if not adapter_layers(module.policy):
        raise ValueError("this model has no adapters, for all its weights were trained; write it whole: merge.")
    _check_empty(folder)
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    inner: Any = module.policy.get_submodule(str(module.policy.base_model_prefix))
    config = copy.deepcopy(inner.peft_config["default"])
    preset: Preset = PRESETS[module.hparams["preset"]]
    config.task_type = "CAUSAL_LM"
    config.base_model_name_or_path = module.hparams["pretrained"] or preset.pretrained
    config.inference_mode = True
    prefix = f"base_model.model.{module.policy.base_model_prefix}."
    weights = {
        f"{prefix}{name}": value.detach().contiguous().cpu() for name, value in get_peft_model_state_dict(inner).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))
    _write_tokenizer(module.chat, folder)
    return sorted(file.name for file in folder.iterdir())


@torch.no_grad()
def merged(policy: nn.Module) -> nn.Module:
    """Return a copy of a model with its adapters merged; a model without adapters itself.

    Adapters may be float32 beside weights of half precision: the sum is rounded once.
    """
    if not adapter_layers(policy):
        return policy
    copied = copy.deepcopy(policy)
    inner = dict(copied.named_modules())
    layers = {id(layer) for layer in adapter_layers(copied)}
    for name, layer in inner.items():
        if id(layer) not in layers:
            continue
        base: Any = layer.get_base_layer()  # pyright: ignore[reportCallIssue]
        dtype = base.weight.dtype
        base.weight.data = base.weight.data.float() if dtype.itemsize < 4 else base.weight.data
        layer.merge(safe_merge=True)  # pyright: ignore[reportCallIssue]
        base.weight.data = base.weight.data.to(dtype)
        path, _, own = name.rpartition(".")
        setattr(inner[path], own, base)
    return copied.requires_grad_(requires_grad=False)


def _add_older_names(file: Path) -> None:
    """Add the names before transformers 5 for settings of rotary positions and sliding windows.

    mlx-lm 0.32 reads only those for Llama, Qwen2 and Gemma 3. It falls back to defaults of its own without a message, and then computes other
    logits. transformers 5 reads the new names where both are there.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    rotary = config.get("rope_parameters") or {}
    main = rotary.get("full_attention", rotary)
    older = {"rope_theta": main.get("rope_theta")}
    if main.get("rope_type", "default") != "default":
        older["rope_scaling"] = {name: value for name, value in main.items() if name != "rope_theta"}
    older["rope_local_base_freq"] = rotary.get("sliding_attention", {}).get("rope_theta")
    older["sliding_window_pattern"] = config.get("_sliding_window_pattern")
    added = {name: value for name, value in older.items() if value is not None and name not in config}
    file.write_text(json.dumps({**config, **added}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_tokenizer(chat: ChatTokenizer, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    named = {"eos_token": chat.end, "pad_token": chat.pad, **chat.special}
    made = PreTrainedTokenizerFast(tokenizer_object=chat.backend, chat_template=chat.template or None, **named)
    made.save_pretrained(folder)


def _check_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder; name another, or remove it.")
