"""Models of many families are sampled from, whatever their cache holds and however they read its length."""

import functools
import logging

import pytest
import torch

from lightning_unified.models.grpo.rollout import Sampler, static_check, static_decoder
from lightning_unified.models.grpo.rollout.growing_decoder import GrowingDecoder
from tests.support.grpo.families import FAMILIES, family
from tests.support.grpo.rollout import language_model, options, prompts, recomputed, seeded


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_those_of_a_forward_over_everything(name: str) -> None:
    model, (prompt, mask) = family(name), prompts()
    found = Sampler(model)(prompt, mask, options(2, 12), generator=seeded())
    expected = recomputed(model, prompt, mask, found, group=2)
    torch.testing.assert_close(found.log_probs, expected, rtol=1e-4, atol=1e-4)
    assert found.decoding == FAMILIES[name][1]


def test_a_step_that_differs_over_a_static_cache_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    once = static_decoder.StaticDecoder._once

    def shifted(self, layers=None) -> None:
        self._positions.add_(3)
        once(self, layers)

    monkeypatch.setattr(static_decoder.StaticDecoder, "_once", shifted)
    model, (prompt, mask) = language_model(), prompts()
    sampler = Sampler(model)
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        for _ in range(2):
            found = sampler(prompt, mask, options(2, 12), generator=seeded())
            expected = recomputed(model, prompt, mask, found, group=2)
            torch.testing.assert_close(found.log_probs, expected, rtol=1e-4, atol=1e-4)
            assert found.decoding == "growing"
    assert [record.message.split(": ")[1].split(" by ")[0] for record in caplog.records] == [
        "the logits of Qwen2ForCausalLM over a static cache differ"
    ]


def test_a_static_cache_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    step = GrowingDecoder.step
    monkeypatch.setattr(static_check.GrowingDecoder, "step", lambda self, tokens: steps.append(1) or step(self, tokens))
    sampler = Sampler(language_model())
    for _ in range(3):
        sampler(*prompts(), options(2, 4))
    assert len(steps) == 1


def test_a_model_that_returns_no_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model()
    forward = type(model).forward

    def without(self, *args, **inputs):
        output = forward(self, *args, **inputs)
        output[next(name for name in ("cache", "past_key_values") if name in output)] = None
        return output

    monkeypatch.setattr(type(model), "forward", functools.wraps(forward)(without))
    with pytest.raises(ValueError, match=r"returns no .*sample from a model that returns its cache"):
        Sampler(model)(*prompts(), options(2, 4))
