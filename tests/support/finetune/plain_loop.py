"""A plain loop of transformers and peft over single conversations, and fits to compare.

The loop sums each conversation's token losses and divides by the scored tokens of the whole batch.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lightning_unified import UnifiedStrategy
from lightning_unified.models.causal_lm.weights import build_language_model
from lightning_unified.models.finetune.data.answers import AnswerMask
from tests.support.finetune import build, chats, data, fit
from tests.support.grpo.training import Gradients

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
__all__ = ["NoFloat32", "check_plain_loop", "tuned"]

KINDS = {"lora": {"lora_rank": 4}, "dora": {"lora_rank": 4, "dora": True}, "full": {"lora_rank": None}}


class NoFloat32(TorchFunctionMode):
    """Cast to float64 where a model casts to float32, to compare up to float64's rounding."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = tree_map(lambda one: torch.float64 if one is torch.float32 else one, (args, kwargs or {}))
        return func(*args, **kwargs)


def tuned(kind, **settings):
    """Return a module whose adapters are no longer zero."""
    module = build(**KINDS[kind], **settings)
    with torch.no_grad():
        for name, parameter in module.policy.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return module


def _plain_model(kind, module):
    """Return the same model, built by transformers and peft alone."""
    hparams = module.hparams
    model = build_language_model(hparams["architecture"], attention=hparams["attention"])
    if kind != "full":
        dora = kind == "dora"
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, lora_alpha=32.0, target_modules="all-linear", use_dora=dora, bias="none")
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


def check_plain_loop(tmp_path, kind, *, size, packing=False, stock=False, tolerance=1e-10, **settings):
    """Compare loss and gradients of one step with those of the plain loop."""
    module, seen = tuned(kind, **settings), Gradients()
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
