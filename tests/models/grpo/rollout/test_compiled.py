"""Steps that are compiled and recorded: the same policy, in every precision."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from lightning_unified.models.grpo.rollout import Sampler
from lightning_unified.models.grpo.rollout.compiled import compiled_blocks
from lightning_unified.models.grpo.rollout.few_rows.layers import reading_weights_once
from lightning_unified.models.grpo.rollout.static_decoder import StaticDecoder
from lightning_unified.models.pretrained.architecture import blocks_of
from tests.support.grpo.rollout import generated, language_model, options, prompts, recomputed, seeded

FAST = ("captured", "compiled")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gap(model, *, temperature=0.8, device="cpu", decoding="static", new=24, autocast=False) -> float:
    """Mean difference between the sampler's log-probabilities and a full forward pass's."""
    prompt, mask = prompts(device=device)
    with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
        sampler = Sampler(model, decoding=decoding)
        found = sampler(prompt, mask, options(4, new, temperature=temperature), generator=seeded(device=device))
        expected = recomputed(model, prompt, mask, found, group=4, temperature=temperature)
    assert found.decoding == decoding
    return float((found.log_probs - expected)[found.mask].abs().mean())


def rounding(model, *, temperature=0.8, device="cpu", autocast=False) -> float:
    """Mean difference between bf16 and float32 log-probabilities at sampled tokens."""
    prompt, mask = prompts(device=device)
    with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
        sampler = Sampler(model, decoding="static")
        found = sampler(prompt, mask, options(4, 24, temperature=temperature), generator=seeded(device=device))
        rounded = recomputed(model, prompt, mask, found, group=4, temperature=temperature)
    exact = recomputed(copy.deepcopy(model).float(), prompt, mask, found, group=4, temperature=temperature)
    return float((rounded - exact)[found.mask].abs().mean())


def compile_steps(monkeypatch: pytest.MonkeyPatch, *, backend: str) -> None:
    """Let a static decoder compile its blocks although it records nothing."""
    once = StaticDecoder._once

    def compiled(self, layers=None) -> None:
        layers, blocks = layers or self._layers(), blocks_of(self._lm)
        reading = reading_weights_once(blocks, rows=self.rows)
        with reading, compiled_blocks(blocks, layers, backend=backend):
            once(self, layers)

    monkeypatch.setattr(StaticDecoder, "_once", compiled)
    refusal = "lightning_unified.models.grpo.rollout.sampler.static_refusal"
    monkeypatch.setattr(refusal, lambda *_, **__: None)  # its steps are not compiled


@pytest.mark.usefixtures("fresh_compiler")
def test_one_compilation_serves_all_blocks_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    model = language_model(adapters=True, num_hidden_layers=4)
    compile_steps(monkeypatch, backend="eager")
    counters.clear()
    assert [gap(model, new=4) < 1e-4 for _ in range(2)] == [True, True]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older torch rounds so on GPUs alone")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_blocks_round_where_the_loss_pass_rounds(monkeypatch: pytest.MonkeyPatch, *, autocast: bool) -> None:
    model = language_model(adapters=True, dtype=torch.float32 if autocast else torch.bfloat16)
    step_by_step = gap(model, autocast=autocast)
    compile_steps(monkeypatch, backend="inductor")
    assert gap(model, autocast=autocast) < 1.3 * step_by_step


@pytest.mark.gpu
@pytest.mark.parametrize("decoding", FAST)
def test_recorded_greedy_completions_are_those_of_generate(decoding: str) -> None:
    model, (prompt, mask) = language_model(adapters=True, device="cuda"), prompts(device="cuda")
    sampler = Sampler(model, decoding=decoding)
    found = sampler(prompt, mask, options(1, 150, temperature=0))  # two lengths of the cache
    assert found.decoding == decoding
    assert torch.equal(found.ids, generated(model, prompt, mask, new=150))


@pytest.mark.gpu
@pytest.mark.parametrize("decoding", FAST)
def test_a_recorded_step_sees_weights_that_were_trained_meanwhile(decoding: str) -> None:
    model, (prompt, mask) = language_model(adapters=True, device="cuda"), prompts(device="cuda")
    sampler = Sampler(model, decoding=decoding, kept_bytes=2**30)
    sampler(prompt, mask, options(2, 8))
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_B" in name:
                one.neg_()
    found = sampler(prompt, mask, options(2, 8))
    expected = recomputed(model, prompt, mask, found, group=2)
    torch.testing.assert_close(found.log_probs, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("decoding", "autocast"),
    [
        ("captured", False),
        ("captured", True),
        ("compiled", False),
        ("compiled", True),
    ],
)
def test_recorded_steps_round_where_the_loss_pass_rounds(decoding: str, *, autocast: bool) -> None:
    model = language_model(adapters=True, device="cuda", dtype=torch.float32 if autocast else torch.bfloat16)
    step_by_step = gap(model, device="cuda", autocast=autocast)
    assert gap(model, device="cuda", decoding=decoding, autocast=autocast) < 2 * step_by_step + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("decoding", FAST)
def test_recorded_steps_are_nearer_to_the_loss_pass_than_bf16_is_to_float32(decoding: str, *, autocast: bool) -> None:
    model = language_model(adapters=True, device="cuda", dtype=torch.float32 if autocast else torch.bfloat16)
    own = rounding(model, device="cuda", autocast=autocast)
    assert gap(model, device="cuda", decoding=decoding, autocast=autocast) < own


@pytest.mark.gpu
def test_graphs_that_stay_serve_the_next_call_at_another_temperature() -> None:
    model, (prompt, mask) = language_model(device="cuda"), prompts(device="cuda")
    sampler, taken = Sampler(model, decoding="captured", kept_bytes=2**30), []
    for temperature in (1.0, 0.5):
        found = sampler(prompt, mask, options(2, 8, temperature=temperature))
        expected = recomputed(model, prompt, mask, found, group=2, temperature=temperature)
        torch.testing.assert_close(found.log_probs, expected, rtol=1e-3, atol=1e-3)
        taken.append((dict(sampler._static._graphs), sampler.cache_bytes))
    assert taken[0] == taken[1]
    assert sampler.cache_bytes > sampler._static._storage.nbytes


@pytest.mark.gpu
def test_a_freed_cache_takes_its_graphs_memory_along() -> None:
    model, (prompt, mask) = language_model(device="cuda"), prompts(device="cuda")
    sampler = Sampler(model, decoding="captured", kept_bytes=0)
    sampler(prompt, mask, options(2, 8))
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        sampler(prompt, mask, options(2, 8))
    assert torch.cuda.memory_allocated() == before
