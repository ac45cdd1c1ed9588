"""Models of many families are sampled from, whatever their cache holds and however they read its length."""

import functools
import logging

import pytest
import torch

from lightning_unified.models.grpo.rollout import Sampler, static_check, static_decoder
from lightning_unified.models.grpo.rollout.growing_decoder import GrowingDecoder
from tests.support.grpo.rollout import language_model, options, prompts, recomputed, seeded

OWN_NAMES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 320, "rotary_dim": 4}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
LINEAR = {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
FAMILIES = {
    "OPT": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, "static"),
    "Falcon": ({"alibi": True}, "growing"),
    "Bloom": ({**OWN_NAMES, "hidden_size": 32}, "growing"),
    "Mpt": ({"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 320}, "static"),
    "GPTJ": (OWN_NAMES, "static"),
    "Mamba": ({"num_hidden_layers": 2}, "growing"),
    "Mamba2": ({"num_heads": 4, "head_dim": 16, "n_groups": 1}, "growing"),
    "FalconH1": (MAMBA, "growing"),
    "Jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1, **EXPERTS}, "growing"),
    "Qwen3Next": ({**LINEAR, "layer_types": ["linear_attention", "full_attention"], **EXPERTS}, "growing"),
}


def family(name: str) -> torch.nn.Module:
    return language_model(name, pad_token_id=0, **FAMILIES[name][0])


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
