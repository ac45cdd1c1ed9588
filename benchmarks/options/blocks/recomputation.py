"""Check the detection and recomputation of blocks in transformers and torchvision models.

Recorded are the blocks found, whether recomputing them changes a bit, and the bytes kept.

    python -m benchmarks.options.blocks.recomputation [--output benchmarks/options/blocks/recomputation.json]

Needs transformers and torchvision; downloads nothing, for all models are made small or untrained. A minute or two on two cores.
Kept bytes are those of the tensors that autograd holds between the forward and the backward pass, parameters not counted.
"""

import copy
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torchvision
import transformers
from torch import Tensor, nn

from benchmarks.records import record_measures
from lightning_unified.nn.module_tree.blocks import find_blocks
from lightning_unified.nn.recomputing import Recomputing

WORDS = {"vocab_size": 97, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
DEEP = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
IMAGES = (
    "resnet18", "resnet50", "vit_b_32", "swin_t", "convnext_tiny", "efficientnet_b0", "mobilenet_v2", "densenet121",
    "vgg11_bn", "squeezenet1_1", "shufflenet_v2_x0_5", "regnet_y_400mf", "googlenet", "inception_v3", "mnasnet0_5",
)  # fmt: skip


def language_models() -> dict[str, Callable[[], nn.Module]]:
    """Return makers of small models by name.

    Decoders fill a cache in training unless `use_cache=False`.
    """

    def made(model: str, config: str, **sizes: object) -> nn.Module:
        return getattr(transformers, model)(getattr(transformers, config)(**WORDS, **sizes))

    return {
        "GPT-2": partial(made, "GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=4, n_head=4),
        "Llama": partial(made, "LlamaForCausalLM", "LlamaConfig", attention_dropout=0.1, **DEEP),
        "Gemma 2": partial(made, "Gemma2ForCausalLM", "Gemma2Config", num_key_value_heads=2, head_dim=8, **DEEP),
        "Qwen 3 MoE": partial(
            made, "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
            num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **DEEP,
        ),
        "BERT": partial(made, "BertForMaskedLM", "BertConfig", **DEEP),
        "DistilBERT": partial(
            made, "DistilBertForMaskedLM", "DistilBertConfig", dim=32, n_layers=3, n_heads=4, hidden_dim=64
        ),
        "ALBERT": partial(made, "AlbertForMaskedLM", "AlbertConfig", embedding_size=16, **DEEP),
        "T5": partial(
            made, "T5ForConditionalGeneration", "T5Config",
            d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0,
        ),
    }  # fmt: skip


def measured(module: nn.Module, step: Callable[[nn.Module, bool], Tensor]) -> dict[str, object]:
    """Return the blocks found in `module`, whether bits agree, and the bytes kept.

    Bits agree if a step with these blocks recomputed leaves the same bits.
    """
    module.train()
    try:
        found = str(find_blocks(module))
    except ValueError as error:
        return {"blocks": None, "why": str(error).partition(" Declare")[0]}
    plain, kept = outcome(copy.deepcopy(module), step, recomputed=False)
    again, kept_again = outcome(copy.deepcopy(module), step, recomputed=True)
    return {
        "blocks": found,
        "equal": all(torch.equal(one, other) for one, other in zip(plain, again, strict=True)),
        "kept bytes": kept,
        "kept bytes, recomputed": kept_again,
    }


def outcome(
    module: nn.Module, step: Callable[[nn.Module, bool], Tensor], *, recomputed: bool
) -> tuple[list[Tensor], int]:
    """Return loss, gradients, state and generator after one step, and saved bytes.

    Saved bytes are those kept for the backward pass.
    """
    storages = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    blocks = Recomputing(find_blocks(module).plain if recomputed else ())
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = step(module, recomputed)
    loss.backward()
    blocks.remove()
    gradients = [torch.zeros(()) if one.grad is None else one.grad for one in module.parameters()]
    return [loss.detach(), *gradients, *module.state_dict().values(), torch.get_rng_state()], sum(kept.values())


def language_step(module: nn.Module, recomputed: bool) -> Tensor:
    """Train on a batch of random tokens.

    The recomputed run gets the cache that its configuration requests.
    """
    tokens = torch.randint(3, 97, (4, 32))
    no_cache = {} if recomputed or not hasattr(module.config, "use_cache") else {"use_cache": False}
    return module(input_ids=tokens, labels=tokens, **no_cache).loss


def image_step(module: nn.Module, _recomputed: bool) -> Tensor:
    """Train on a batch of random images."""
    out = module(torch.randn(2, 3, 224, 224))
    return (out if isinstance(out, Tensor) else out[0]).square().mean()


def libraries() -> dict[str, str]:
    """The versions whose models these are."""
    return {"transformers": transformers.__version__, "torchvision": torchvision.__version__}


def language() -> dict[str, object]:
    """Small models of transformers, batch 4 x 32 tokens."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results = {}
    for name, make in language_models().items():
        torch.manual_seed(0)
        results[name] = measured(make(), language_step)
    return results


def images() -> dict[str, object]:
    """Models of torchvision, untrained, batch 2 of 224 x 224."""
    results = {}
    for name in IMAGES:
        torch.manual_seed(0)
        options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        results[name] = measured(getattr(torchvision.models, name)(**options), image_step)
    return results


if __name__ == "__main__":
    sys.exit(record_measures("options.blocks.recomputation", Path(__file__), (libraries, language, images)))
