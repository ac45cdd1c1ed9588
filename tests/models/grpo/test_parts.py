"""The reference, scores of sequences, prepared batches and the buffer, each by itself."""

import copy

import pytest
import torch

from lightning_unified.models.causal_lm.language_model import check_head, head_of, score
from lightning_unified.models.grpo import RolloutBuffer
from lightning_unified.models.grpo.batches.sequences import completed
from lightning_unified.models.grpo.reference import Reference
from tests.support.grpo.training import VOCABULARY, policy, prompts, traces

IDS = torch.arange(12).view(2, 6)


def _step(model):
    """Train `model` a little."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def _logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def _wrapped():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(policy(), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


@pytest.mark.parametrize(
    ("make", "trained_before", "kind"),
    [
        (lambda: policy(adapters=True), False, "adapters off"),
        (lambda: policy(adapters=True), True, "copy"),
        (_wrapped, False, "adapters off"),
        (policy, False, "copy"),
    ],
)
def test_the_reference_stays_as_the_policy_was(make, trained_before, kind):
    model, reference = make().eval(), Reference()
    if trained_before:
        _step(model)
    expected = _logits(model)
    reference.begin(model)
    _step(model)
    flags, own = {name: one.requires_grad for name, one in model.named_parameters()}, _logits(model)
    assert reference.kind == kind
    assert not torch.equal(own, expected)
    with reference.on(model):
        assert torch.equal(_logits(model), expected)
    assert torch.equal(_logits(model), own)
    assert {name: one.requires_grad for name, one in model.named_parameters()} == flags


def test_fresh_adapters_need_no_copy():
    reference = Reference()
    reference.begin(policy(adapters=True))
    assert not list(reference.parameters())


def test_the_reference_has_no_dropout_and_the_policy_has_its_mode_back():
    model, reference = policy(dropout=0.5).train(), Reference()
    expected = _logits(model.eval())
    model.train()
    reference.begin(model)
    with reference.on(model):
        assert torch.equal(_logits(model), expected)
    assert all(child.training for child in model.modules())


def test_a_reference_that_has_not_begun_cannot_run():
    with pytest.raises(RuntimeError, match="there is no reference yet"), Reference().on(policy()):
        pass


def test_a_reference_of_other_weights_is_refused():
    reference, other = Reference(), Reference()
    reference.begin(policy())
    with pytest.raises(ValueError, match=r"weights that this policy has not, the first model.layers.1"):
        other.restore(reference.state(), policy(layers=1))


def test_scores_are_those_of_each_sequence_alone():
    model, batch = policy().double(), prompts()
    lengths = torch.tensor([3, 1, 4, 2])
    mask = torch.arange(4) < lengths[:, None]
    ids = torch.randint(VOCABULARY, mask.shape) * mask
    rows = completed(batch["prompt"], batch["prompt_mask"], ids=ids, mask=mask)
    log_probs, entropy = score(model, rows["tokens"], start=rows["start"], chosen=rows["chosen"], temperature=0.5)
    for index, length in enumerate(lengths.tolist()):
        alone = torch.cat([batch["prompt"][index][batch["prompt_mask"][index]], ids[index, :length]])
        scores = (model(input_ids=alone[None]).logits[0, -length - 1 : -1] / 0.5).log_softmax(-1)
        torch.testing.assert_close(log_probs[index, :length], scores.gather(1, ids[index, :length, None])[:, 0])
        torch.testing.assert_close(entropy[index, :length], -(scores.exp() * scores).sum(1))


def test_scores_of_a_capped_model_with_a_bias_are_those_of_its_logits():
    model = policy().double()
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1.0, 1.0, VOCABULARY, dtype=torch.float64))
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: 0.5 * torch.tanh(logits / 0.5))
    check_head(model)
    start, chosen = torch.tensor([1, 2]), IDS[:, 2:5]
    log_probs, entropy = score(model, IDS, start=start, chosen=chosen, temperature=0.7, chunk=2)
    places = start[:, None] - 1 + torch.arange(3)
    all_scores = (model(input_ids=IDS).logits[torch.arange(2)[:, None], places] / 0.7).log_softmax(-1)
    expected = all_scores.gather(-1, chosen[..., None])[..., 0]
    trained = list(model.parameters())
    outer = torch.linspace(0.5, 2.0, 6, dtype=torch.float64).view(2, 3)

    torch.testing.assert_close(log_probs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, -(all_scores.exp() * all_scores).sum(-1), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad((log_probs * outer).sum(), trained),
        torch.autograd.grad((expected * outer).sum(), trained),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_head_with_an_adapter_is_refused():
    model = policy()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="has a Sequential; leave lm_head out of lora_targets"):
        head_of(model)


def test_the_buffer_repeats_prompts_and_numbers_them():
    loader = [traces(), prompts(), prompts(first=4)]
    found = list(RolloutBuffer(loader, inner_iterations=2))
    assert [int(batch["iteration"]) if "iteration" in batch else None for batch in found] == [None, 0, 1, 0, 1]
    assert [batch["example"][0].item() for batch in found[1:]] == [0, 0, 4, 4]


def test_the_buffer_goes_on_between_two_iterations():
    class Loader(list):
        supervised_batches = 1

    loader = Loader([traces(), prompts()])
    buffer = RolloutBuffer(loader, inner_iterations=3)
    assert len(buffer) == 4
    batches = iter(buffer)
    next(batches), next(batches)
    other = RolloutBuffer([], inner_iterations=3)
    other.load_state_dict(copy.deepcopy(buffer.state_dict()))
    assert [int(batch["iteration"]) for batch in other] == [1, 2]


def test_the_buffer_gives_a_batch_at_least_once():
    with pytest.raises(ValueError, match="inner_iterations=0; give 1 or more"):
        RolloutBuffer([], inner_iterations=0)
