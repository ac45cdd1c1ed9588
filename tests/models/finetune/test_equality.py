"""Loss and gradients are those of a plain loop with transformers and peft, one conversation at a time.

The plain loop sums each conversation's token losses and divides by the scored tokens of the whole batch.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy

from lightning_unified import UnifiedStrategy
from lightning_unified.models.causal_lm.weights import build_language_model
from lightning_unified.models.finetune.data.answers import AnswerMask
from tests.support.finetune import TINY, build, chats, data, fit
from tests.support.grpo.training import Gradients
from tests.support.lanes import slow

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
KINDS = {"lora": {"lora_rank": 4}, "dora": {"lora_rank": 4, "dora": True}, "full": {"lora_rank": None}}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _tuned(kind):
    """Return a module whose adapters are no longer zero."""
    module = build(**KINDS[kind])
    with torch.no_grad():
        for name, parameter in module.policy.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return module


def _plain_model(kind, module):
    """Return the same model, built by transformers and peft alone."""
    model = build_language_model(TINY)
    if kind != "full":
        dora = kind == "dora"
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, lora_alpha=32.0, target_modules=LINEAR, use_dora=dora, bias="none")
        )
    model = model.double()
    given = {name: value.double() for name, value in module.policy.state_dict().items()}
    prefix = "" if kind == "full" else "base_model.model."
    missing = model.load_state_dict({f"{prefix}{name}": value for name, value in given.items()}, strict=False)
    assert not missing.unexpected_keys
    assert not missing.missing_keys
    return model


def _sequences(prepared):
    encode = AnswerMask(prepared.chat, loss_on="answers", prompts="auto")
    prepared.setup("fit")
    examples = [encode(one) for one in prepared._prepared.sides.train]
    ids = [torch.from_numpy(one.ids).long() for one in examples]
    masks = [torch.from_numpy(one.scored) for one in examples]
    return [(each, each.where(mask, -100)) for each, mask in zip(ids, masks, strict=True)]


def _plain_loop(model, sequences, *, stock):
    """Return the loss and the gradients by name."""
    total = sum(int((labels[1:] != -100).sum()) for _, labels in sequences)
    loss = 0.0
    for ids, labels in sequences:
        if stock:
            own = model(input_ids=ids[None], labels=labels[None], num_items_in_batch=torch.tensor(total)).loss
        else:
            own = cross_entropy(model(input_ids=ids[None]).logits[0, :-1], labels[1:], reduction="sum") / total
        own.backward()
        loss += float(own)
    return loss, {
        name.removeprefix("base_model.model.").replace(".default", ""): one.grad
        for name, one in model.named_parameters()
        if one.grad is not None
    }


def _check(tmp_path, kind, *, packing, size, stock=False, tolerance=1e-10):
    module, seen = _tuned(kind), Gradients()
    prepared = data(chats(tmp_path), packing=packing, batch_size=1, drop_last=False)
    sequences = _sequences(prepared)
    rows = len(prepared.rows[0])
    loss, expected = _plain_loop(_plain_model(kind, module), sequences, stock=stock)
    whole = data(chats(tmp_path), packing=packing, batch_size=rows)
    strategy = "auto" if size is None else UnifiedStrategy(micro_batch_size=size, predict=False)
    trainer = fit(module, whole, tmp_path, seen, strategy=strategy, precision="64-true")
    found = {name.replace(".default", ""): grad for name, grad in seen.steps[0].items()}

    assert len(sequences) > rows if packing else len(sequences) == rows
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(loss, rel=tolerance)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance * float(gradient.abs().max()))


@pytest.mark.parametrize("size", [None, 1, 2, 3])
@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
def test_adapters_get_the_gradients_of_a_plain_loop(tmp_path, packing, size):
    _check(tmp_path, "lora", packing=packing, size=size)


@pytest.mark.parametrize("size", [None, 1, slow(2)])
@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", ["dora", "full"])
def test_dora_and_all_weights_get_them_too(tmp_path, kind, packing, size):
    _check(tmp_path, kind, packing=packing, size=size)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
def test_transformers_own_loss_agrees_as_far_as_it_is_float32(tmp_path, kind, packing):
    _check(tmp_path, kind, packing=packing, size=2, stock=True, tolerance=1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_a_loss_chunk_changes_no_gradient(tmp_path, size):
    seen, path = {}, chats(tmp_path)
    for chunk in (None, 2):
        module, seen[chunk] = _tuned("lora"), Gradients()
        module.loss_chunk_rows = chunk
        strategy = UnifiedStrategy(micro_batch_size=size, predict=False)
        fit(module, data(path), tmp_path, seen[chunk], strategy=strategy, precision="64-true")
    for name, gradient in seen[None].steps[0].items():
        torch.testing.assert_close(seen[2].steps[0][name], gradient, rtol=1e-10, atol=1e-14)
