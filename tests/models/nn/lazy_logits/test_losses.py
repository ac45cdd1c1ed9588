"""Losses and gradients of lazy logits equal those of all logits, by family and loss."""

import copy

import pytest
import torch
from torch.nn import CrossEntropyLoss, functional
from torch.utils.checkpoint import checkpoint

from lightning_unified.nn.lazy_logits import LazyHeads
from lightning_unified.nn.lazy_logits.tensor import LazyLogits

pytest.importorskip("transformers")

from tests.support.causal_lms import FAMILIES, VOCABULARY, causal_lm
from tests.support.lanes import first_cells

ROWS = 5  # of a chunk: 33 positions make seven chunks, the last one shorter


def batch():
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, 11))
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def logits_of(model, ids):
    extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **extra).logits


def by_labels(model):
    ids, labels = batch()
    return model(input_ids=ids, labels=labels).loss


def by_count(model):
    ids, labels = batch()
    return model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(20)).loss


def by_slices(model):
    ids, labels = batch()
    logits = logits_of(model, ids)
    return functional.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1))


def by_weights(model):
    ids, labels = batch()
    logits = logits_of(model, ids)[..., :-1, :].contiguous()
    weight = torch.linspace(0.5, 2, VOCABULARY, dtype=logits.dtype)
    loss = CrossEntropyLoss(weight=weight, label_smoothing=0.1, reduction="mean")
    return loss(logits.view(-1, VOCABULARY), labels[..., 1:].contiguous().view(-1))


def by_ignored_label(model):
    ids, _ = batch()
    return functional.cross_entropy(logits_of(model, ids).flatten(0, 1), ids.flatten(), ignore_index=int(ids[0, 1]))


def by_classes_first(model):
    ids, labels = batch()
    return functional.cross_entropy(logits_of(model, ids).transpose(1, 2), labels, reduction="sum")


def by_rows(model):
    ids, labels = batch()
    losses = functional.cross_entropy(logits_of(model, ids).flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * torch.linspace(0, 1, len(losses))).sum()


def by_positions(model):
    ids, _ = batch()
    return functional.cross_entropy(logits_of(model, ids)[ids > 30] * 1.5 + 0.25, ids[ids > 30])


def with_accuracy(model):
    ids, labels = batch()
    logits = logits_of(model, ids)
    accuracy = (logits[:, :-1].argmax(-1) == labels[:, 1:]).double().mean()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + accuracy


def within_a_checkpoint(model):
    return checkpoint(lambda: by_labels(model), use_reentrant=False)


def by_log_softmax(model):
    ids, _ = batch()
    return -logits_of(model, ids).log_softmax(-1).gather(-1, ids[..., None]).mean()


def after_a_write(model):
    ids, labels = batch()
    logits = logits_of(model, ids)
    logits[:, :, 3:5] = -5.0
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def with_a_penalty(model):
    ids, labels = batch()
    logits = logits_of(model, ids)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.square().mean()


def with_a_metric_before(model):
    ids, labels = batch()
    logits = logits_of(model, ids)
    with torch.no_grad():
        sharpness = logits.softmax(-1).amax()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + sharpness


class MeanSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.pow(2).mean()

    @staticmethod
    def backward(ctx, outer):
        (logits,) = ctx.saved_tensors
        return outer * 2 * logits / logits.numel()


def by_a_function_of_the_user(model):
    return MeanSquare.apply(logits_of(model, batch()[0]))


IN_CHUNKS = [
    by_labels, by_count, by_slices, by_weights, by_ignored_label, by_classes_first, by_rows, by_positions, with_accuracy, within_a_checkpoint,
]  # fmt: skip
COMPUTED = {
    by_log_softmax: "log_softmax",
    after_a_write: "__setitem__",
    with_a_penalty: "square",
    with_a_metric_before: "softmax",
    by_a_function_of_the_user: "pow",
}


def gradients(model, loss_of):
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return loss.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_equal(model, loss_of, *, most=1e-12):
    """Compare a model with all logits and its twin in chunks; return the twin's log lines."""
    twin = copy.deepcopy(model)
    heads = LazyHeads(twin, ROWS)
    said = heads._stand_ins[0]._said
    (loss, expected), (ours, found) = gradients(model, loss_of), gradients(twin, loss_of)
    heads.remove()

    assert ours.dtype == loss.dtype
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-6)  # the models' own loss is in float32
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= most * max(1.0, gradient.abs().max()), name
    return said


@pytest.fixture(scope="module", params=["Qwen2", "Gemma2"])
def model(request):
    return causal_lm(request.param)


@first_cells(9, "loss_of", IN_CHUNKS, ids=lambda one: one.__name__)
def test_a_loss_in_chunks_equals_that_of_all_logits(model, loss_of):
    assert not assert_equal(model, loss_of)


@pytest.mark.parametrize("loss_of", COMPUTED, ids=lambda one: one.__name__)
def test_an_operation_that_reads_logits_gets_them_and_is_named_once(model, loss_of):
    said = assert_equal(model, loss_of)

    assert [text.split()[0] for text in sorted(said)][-1:] == [COMPUTED[loss_of]]


def test_the_logits_of_all_rows_never_exist(model):
    rows = set()

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() > 1 and out.shape[-1] == VOCABULARY:
                rows.add(out.shape[:-1].numel())
            return out

    heads = LazyHeads(model, ROWS)
    with Sizes():
        gradients(model, by_labels)
    heads.remove()

    assert ROWS in rows and 33 not in rows


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loss_of", [*IN_CHUNKS, *COMPUTED], ids=lambda one: one.__name__)
def test_every_family_trains_the_same(family, loss_of):
    assert_equal(causal_lm(family), loss_of)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_a_frozen_head_passes_its_gradient_on(family):
    model = causal_lm(family)
    model.lm_head.weight.requires_grad_(False)

    assert not assert_equal(model, by_slices)


def test_a_hook_on_the_heads_weight_runs_once():
    model = causal_lm("Llama")
    calls = []
    model.lm_head.weight.register_hook(lambda gradient: calls.append(1) or gradient * 0.5)
    heads = LazyHeads(model, ROWS)
    by_weights(model).backward()
    heads.remove()

    assert calls == [1]


@pytest.mark.parametrize(
    ("family", "loss_of"), [("Llama", by_labels), ("Gemma2", by_slices), ("Llama", with_a_penalty)]
)
def test_under_autocast_gradients_differ_by_roundings_of_bf16(family, loss_of):
    def under_autocast(model):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model)

    assert_equal(causal_lm(family, dtype=torch.float32), under_autocast, most=2**-7)


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_adapters_on_the_head_are_trained(family, settings):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False, **settings)
    model = peft.get_peft_model(causal_lm(family), config).double()

    assert not assert_equal(model, by_slices)
    assert any("lm_head" in name for name, one in model.named_parameters() if one.requires_grad)


@pytest.mark.parametrize(
    "target", [{"target_modules": ["q_proj"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}]
)
def test_heads_of_adapted_models_are_found(target):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(causal_lm("Llama"), peft.LoraConfig(r=2, init_lora_weights=False, **target)).double()

    assert not assert_equal(model, by_slices)


def test_generation_inside_the_step_computes_its_logits(model):
    def with_generation(model):
        ids, _ = batch()
        assert type(logits_of(model, ids)) in (torch.Tensor, LazyLogits)
        new = model.generate(ids, max_new_tokens=2, do_sample=False)
        return by_labels(model) + new.sum()

    assert not assert_equal(model, with_generation)
