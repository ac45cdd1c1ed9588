"""Output heads with lazy logits: which ones, when, and that nothing of it stays."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lightning_unified.nn import lazy_logits
from lightning_unified.nn.lazy_logits import LazyHeads, obstacles, output_heads, rows_of
from lightning_unified.nn.lazy_logits.tensor import LazyLogits

pytest.importorskip("transformers")

from tests.support.causal_lms import causal_lm

IDS = torch.arange(3, 17).reshape(2, 7)


def kind(model):
    return type(model(input_ids=IDS).logits)


@pytest.fixture
def model():
    return causal_lm("Llama", dtype=torch.float32)


def test_logits_are_lazy_in_training_alone_and_plain_after_remove(model):
    heads = LazyHeads(model, 4)
    assert heads.names == ("lm_head",) and rows_of(model) == 4
    assert kind(model) is LazyLogits
    with torch.no_grad():
        assert kind(model) is torch.Tensor
    heads.remove()
    heads.remove()

    assert kind(model) is torch.Tensor and "forward" not in vars(model.lm_head) and rows_of(model) is None


def test_metadata_is_known_without_a_value(model):
    plain = model(input_ids=IDS).logits
    heads = LazyHeads(model, 4)
    logits = model(input_ids=IDS).logits

    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout"):
        assert getattr(logits, name) == getattr(plain, name), name
    assert (logits.size(-1), logits.dim(), logits.numel(), len(logits)) == (67, 3, plain.numel(), 2)
    assert logits.bfloat16().dtype == torch.bfloat16 and logits[:, -1].shape == (2, 67)
    assert logits.view_of_logits.source.real is None
    heads.remove()


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_has_the_heads_own_forward_and_can_get_lazy_logits_again(model, copied):
    heads = LazyHeads(model, 4)
    if copied == "deepcopy":
        twin = copy.deepcopy(model)
    elif copied == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    heads.remove()

    assert kind(twin) is torch.Tensor
    again = LazyHeads(twin, 4)
    assert kind(twin) is LazyLogits and model.state_dict().keys() == twin.state_dict().keys()
    again.remove()


def replaced(model):
    model.lm_head.forward = lambda hidden: nn.functional.linear(hidden, model.lm_head.weight)


def compiled_head(model):
    model.lm_head.compile(backend="eager")


def compiled(model):
    model.compile(backend="eager")


def other_head(model):
    model.lm_head = nn.Sequential(nn.Linear(32, 67))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (replaced, "its forward was replaced on the object"),
        (compiled_head, "Linear is compiled"),
        (compiled, "LlamaForCausalLM is compiled"),
        (other_head, "Sequential is not known to treat each position by itself"),
    ],
)
def test_a_head_that_cannot_have_lazy_logits_is_named_and_stays_as_it_is(model, caplog, change, why):
    change(model)
    assert obstacles(model) == {"lm_head": why}
    forward = model.lm_head.forward
    heads = LazyHeads(model, 4)

    assert heads.names == () and model.lm_head.forward == forward
    assert f"lm_head stays as it is, because {why}." in caplog.text
    heads.remove()


def test_a_head_with_backward_hooks_or_active_dropout_computes_its_logits(model, caplog):
    heads = LazyHeads(model, 4)
    calls = []
    handle = model.lm_head.register_full_backward_hook(lambda *_: calls.append(1))
    logits = model(input_ids=IDS).logits
    logits.sum().backward()
    assert type(logits) is torch.Tensor and calls == [1] and "it has backward hooks" in caplog.text
    handle.remove()

    assert kind(model) is LazyLogits
    heads.remove()


def test_a_forward_hook_of_the_head_sees_and_changes_its_output(model):
    model.lm_head.register_forward_hook(lambda module, args, output: output * 3)
    expected = model(input_ids=IDS, labels=IDS).loss
    heads = LazyHeads(model, 4)

    torch.testing.assert_close(model(input_ids=IDS, labels=IDS).loss, expected)
    heads.remove()


def test_a_module_without_such_models_has_no_heads():
    assert output_heads(nn.Sequential(nn.Linear(3, 3))) == {} and rows_of(nn.Linear(3, 3)) is None


def test_a_model_whose_own_method_fails_has_no_heads_and_says_so_once(model, caplog, monkeypatch):
    def fail(self):
        raise ValueError("no head yet")

    monkeypatch.setattr(type(model), "get_output_embeddings", fail)
    monkeypatch.setattr(lazy_logits.find, "_SAID", set())

    assert output_heads(model) == {} == output_heads(model)
    assert [record.message for record in caplog.records] == [
        f"{type(model).__name__}.get_output_embeddings() raised ValueError: no head yet. {lazy_logits.find.PLAIN}"
    ]


@pytest.mark.parametrize("by_closure", [False, True])
def test_logits_that_someone_keeps_are_those_before_the_update(model, caplog, by_closure):
    expected = model(input_ids=IDS).logits.detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    heads = LazyHeads(model, 4)
    kept = []

    def closure():
        out = model(input_ids=IDS, labels=IDS)
        kept.append(out.logits.detach())
        out.loss.backward()
        return out.loss

    if by_closure:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    heads.remove()

    torch.testing.assert_close(kept[0].clone(), expected)
    assert "a reference held until the optimizer's step reads the logits" in caplog.text


def test_logits_read_after_their_weights_changed_by_hand_are_refused(model):
    heads = LazyHeads(model, 4)
    logits = model(input_ids=IDS).logits
    with torch.no_grad():
        model.lm_head.weight.mul_(2)

    with pytest.raises(RuntimeError, match="are read after its weights were changed"):
        logits.sum()
    heads.remove()
