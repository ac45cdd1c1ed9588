"""Families that scale, cap or cast logits have the gradients of a plain loop."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_unified.models.causal_lm.language_model import check_head, linear_logits
from lightning_unified.models.causal_lm.weights import build_language_model
from tests.support.finetune import TINY, build, chats, data, fit
from tests.support.finetune.plain_loop import NoFloat32, check_plain_loop
from tests.support.lanes import crossed, first_cells, some

COMMON = {**TINY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CAPPED = {"head_dim": 8, "final_logit_softcapping": 3.0}
CHANGED = {
    "gemma2": CAPPED,
    "gemma3_text": CAPPED,
    "granite": {"logits_scaling": 6.0},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
}
"""Families whose head's output is not the logits."""
OTHERS = {
    "beam": CAPPED,  # in float32
    "nanochat": CAPPED,
    "hyperclovax": {"logits_scaling": 0.3},
    "minicpm3": {"dim_model_base": 8, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
                 "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8},  # hidden states are scaled before the head
    "phi": {},  # its head has a bias
}  # fmt: skip
IDS = torch.arange(3, 17).reshape(2, 7)


def architecture(family):
    return {**COMMON, **CHANGED.get(family, {}), **OTHERS.get(family, {}), "model_type": family}


def settings(family):
    return {
        "architecture": architecture(family),
        "attention": "eager",
    }  # transformers has no other attention for Gemma2


def tiny(family="llama", **changes):
    torch.manual_seed(0)
    return build_language_model({**architecture(family), **changes}, attention="eager").double()


@first_cells(
    1,
    ("family", "kind", "size"),
    crossed(
        CHANGED,
        ["lora", "full"],
        [None, 1, 3],
        fast=[("gemma2", "lora", 3), ("granite", "full", 1), ("cohere", "lora", None)],
    ),
)
def test_gradients_are_those_of_a_plain_loop(tmp_path, family, kind, size):
    with NoFloat32():
        check_plain_loop(tmp_path, kind, size=size, **settings(family))


@pytest.mark.slow
@first_cells(1, "family", some(OTHERS, "beam", "minicpm3"))
def test_other_families_get_them_too(tmp_path, family):
    with NoFloat32():
        check_plain_loop(tmp_path, "lora", size=2, **settings(family))


@pytest.mark.slow
@pytest.mark.parametrize("kind", some(["lora", "full"], "lora"))
def test_packed_rows_and_chunks_change_nothing(tmp_path, kind):
    with NoFloat32():
        check_plain_loop(tmp_path, kind, size=2, packing=True, **settings("gemma2"))


@first_cells(1, "dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*CHANGED, *OTHERS, "llama"])
def test_the_logits_are_the_models_own(family, dtype):
    model = tiny(family).to(dtype)
    check_head(model)
    found = linear_logits(model, IDS)
    expected = model(input_ids=IDS, use_cache=False).logits

    assert found.hidden.requires_grad
    assert (found.transform is None) == (family in ("minicpm3", "phi", "llama"))
    torch.testing.assert_close(found.computed(), expected)
    assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_that_is_compiled_as_a_whole_is_recorded_uncompiled(in_place):
    model = tiny("granite")
    compiled = model if in_place else torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    found = linear_logits(compiled, IDS)

    torch.testing.assert_close(found.computed(), model.forward(input_ids=IDS).logits)


def test_a_cast_to_float32_alone_needs_no_transform_in_half_precision():
    model = tiny().bfloat16()
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits.float())
    check_head(model)
    assert linear_logits(model, IDS).transform is None
    assert linear_logits(model.double(), IDS).transform is not None


@pytest.mark.parametrize("precision", some(["32-true", "bf16-mixed"], "bf16-mixed"))
def test_a_capped_model_validates_and_trains(tmp_path, precision):
    module = build(lora_rank=2, **settings("gemma2"))
    trainer = fit(module, data(chats(tmp_path)), tmp_path, steps=2, precision=precision, limit_val_batches=1)
    assert {"train/loss", "val/loss"} <= trainer.callback_metrics.keys()


def test_a_cap_is_part_of_the_loss_in_chunks():
    model = tiny("gemma2")
    labels = IDS.roll(-1, 1)
    found = linear_logits(model, IDS)
    uncapped = cross_entropy((found.hidden @ found.weight.T).flatten(0, 1), labels.flatten())
    capped = cross_entropy(found.computed().flatten(0, 1), labels.flatten())
    expected = model(input_ids=IDS).logits.flatten(0, 1)

    torch.testing.assert_close(capped, cross_entropy(expected, labels.flatten()), rtol=1e-12, atol=0.0)
    assert abs(float(capped - uncapped)) > 1e-3


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, logits):
        return logits * self.factor


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda logits: logits - logits.logsumexp(-1, keepdim=True), "logsumexp reads the output of its head"),
        (lambda logits: logits.mul_(2.0), "mul_ reads the output of its head"),
        (Scale(), "a trained tensor is applied after its head"),
        (lambda logits: logits * 2.0 if type(logits) is torch.Tensor else logits, r"they differ by .* the operations after it"),
    ],
)  # fmt: skip
def test_what_cannot_run_in_chunks_is_refused_by_name(change, why):
    model = tiny()
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: change(logits))
    with pytest.raises(
        ValueError, match=f"logits of LlamaForCausalLM cannot be computed in chunks: {why}.*Take another model"
    ):
        check_head(model)
    assert "forward" not in vars(model.lm_head)


def test_a_compiled_head_is_refused():
    model = tiny()
    model.lm_head.compile(backend="eager")
    with pytest.raises(ValueError, match="its head is compiled; compile the blocks of the model alone"):
        check_head(model)


def test_a_sliced_vocabulary_is_refused():
    model = tiny()
    own = model.forward
    model.forward = lambda **inputs: _sliced(own(**inputs))
    with pytest.raises(ValueError, match="__getitem__ reads the output of its head"):
        check_head(model)


def _sliced(output):
    output.logits = output.logits[..., :50]
    return output


def test_logits_from_elsewhere_are_refused():
    model = tiny()
    weight = model.lm_head.weight
    model.lm_head.forward = lambda hidden: hidden @ weight.T
    model.get_output_embeddings = lambda: nn.Linear(32, 320, bias=False).double()
    with pytest.raises(ValueError, match="they do not come from the output of its head"):
        check_head(model)
