"""Prompts whose shape comes again are read by recordings, and the result is the model's own."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch

from lightning_unified.models.causal_lm.language_model import evaluating
from lightning_unified.models.grpo.rollout import Sampler, recorded_prompts, sampler, static_decoder
from lightning_unified.models.grpo.rollout.recorded_prompts import RecordedPrompts, padded, read_prompts
from tests.support.grpo.rollout import generated, language_model, options, prompts, recomputed, seeded


class Recording:
    """Stands in for a CUDA graph where there is no CUDA: a replay runs the step again."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


class Replays:
    """Stands in for `capture`, and counts recorded and replayed prompts."""

    def __init__(self) -> None:
        self.made = self.run = 0

    def capture(self, step: Callable[[], None], **_) -> Recording:
        def replay() -> None:
            self.run += 1
            step()

        self.made += 1
        step()
        return Recording(replay)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    stand_in = Replays()
    monkeypatch.setattr(recorded_prompts, "capture", stand_in.capture)
    monkeypatch.setattr(recorded_prompts, "new_pool", lambda: (0, 0))
    monkeypatch.setattr(recorded_prompts, "pool_bytes", lambda _: 1000 * stand_in.made)
    monkeypatch.setattr(recorded_prompts, "refusing_waits", nullcontext)
    return stand_in


@pytest.fixture
def model() -> Iterator[torch.nn.Module]:
    model = language_model()
    with torch.no_grad(), evaluating(model):
        yield model


def reader(model: torch.nn.Module) -> RecordedPrompts:
    return RecordedPrompts(model, dtype=torch.float32, context=nullcontext)


def test_a_shape_is_recorded_when_it_comes_again(model: torch.nn.Module, replays: Replays) -> None:
    read = reader(model).read
    for seed in range(4):
        prompt, mask = prompts()
        prompt = prompt.roll(seed, 0) * mask
        logits, cache = read(prompt, mask)
        own, kept = read_prompts(model, prompt, mask)
        torch.testing.assert_close(logits, own)
        for found, expected in zip(cache.layers, kept.layers, strict=True):
            there = mask[:, None, :, None]
            torch.testing.assert_close(found.keys * there, expected.keys * there)
            torch.testing.assert_close(found.values * there, expected.values * there)
    assert (replays.made, replays.run) == (1, 2)
    read(*prompts(length=9))
    assert replays.made == 1


def test_prompts_that_would_take_many_bytes_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module, replays: Replays
) -> None:
    monkeypatch.setattr(recorded_prompts, "_SHARE", 0)
    monkeypatch.setattr(recorded_prompts, "_LEAST", 1000)
    one, other = reader(model), prompts(1, length=9)
    for _ in range(3):
        one.read(*other)
    assert replays.made == 0

    monkeypatch.setattr(recorded_prompts, "_LEAST", 4700)
    two = reader(model)
    for length in (9, 9, 10, 10, 11, 11, 12, 12):
        two.read(*prompts(1, length=length))
    assert (replays.made, two.nbytes) == (2, 2000)


def test_padded_prompts_have_a_length_that_comes_again(model: torch.nn.Module) -> None:
    prompt, mask = prompts(length=41)
    more, there = padded(prompt, mask)
    assert more.shape == there.shape == (3, 64)
    torch.testing.assert_close(read_prompts(model, more, there)[0], read_prompts(model, prompt, mask)[0])
    long = prompts(length=1000)
    assert padded(*long)[0] is long[0]


@pytest.mark.parametrize("breaks", ["another mask", "memory"])
def test_prompts_that_cannot_be_recorded_are_read_as_they_are(
    monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module, replays: Replays, breaks: str
) -> None:
    def wrong(lm, **inputs):
        if inputs["attention_mask"].ndim == 2:
            return own(lm, **inputs)
        if breaks == "memory":
            raise torch.OutOfMemoryError
        return own(lm, **{**inputs, "attention_mask": None})

    own = recorded_prompts.forward_last
    monkeypatch.setattr(recorded_prompts, "forward_last", wrong)
    prompt, mask = prompts(length=9)
    expected = read_prompts(model, prompt, mask)[0]
    reading = reader(model)
    for _ in range(4):
        assert torch.equal(reading.read(prompt, mask)[0], expected)
    assert (replays.made, replays.run, reading.nbytes) == (0, 0, 0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, replays: Replays) -> list[Recording]:
    """Let a sampler record where there is no CUDA; return the recorded steps."""
    steps: list[Recording] = []

    def capture(step: Callable[[], None], **_) -> Recording:
        steps.append(Recording(step))
        return steps[-1]

    monkeypatch.setattr(static_decoder, "capture", capture)
    monkeypatch.setattr(static_decoder, "new_pool", lambda: (0, 0))
    monkeypatch.setattr(static_decoder, "pool_bytes", lambda _: 0)
    monkeypatch.setattr(sampler, "resolve_decoding", lambda *_, **__: "captured")
    return steps


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("group", [1, 4])
def test_a_sampler_with_recorded_prompts_samples_as_without(replays: Replays, group: int) -> None:
    model = language_model(adapters=True)
    sampling, plain = Sampler(model, kept_bytes=2**30), Sampler(model, decoding="growing")
    for seed in range(5):
        prompt, mask = prompts()
        prompt = prompt.roll(seed, 0) * mask
        found = sampling(prompt, mask, options(group, 24), generator=seeded(seed))
        expected = plain(prompt, mask, options(group, 24), generator=seeded(seed))
        assert (found.decoding, expected.decoding) == ("captured", "growing")
        assert torch.equal(found.ids, expected.ids)
        torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)
    assert (replays.made, replays.run) == (1, 2)


@pytest.mark.usefixtures("made")
def test_recorded_prompts_are_freed_first(replays: Replays) -> None:
    sampling = Sampler(language_model(), kept_bytes=2**30)
    for _ in range(4):
        sampling(*prompts(), options(2, 8))
    held = sampling.cache_bytes
    sampling._kept_bytes = held - 1
    for _ in range(3):
        sampling(*prompts(), options(2, 8))
        assert sampling.cache_bytes == held - 1000
    assert replays.made == 1


def test_switched_adapters_are_recorded_anew(made: list[Recording]) -> None:
    model = language_model(adapters=True)
    sampling = Sampler(model, kept_bytes=2**30)
    for _ in range(2):
        sampling(*prompts(), options(2, 8))
    assert len(made) == 1
    with model.disable_adapter():
        sampling(*prompts(), options(2, 8))
    assert len(made) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_recorded_prompts_give_the_models_completions(*, autocast: bool) -> None:
    model = language_model(adapters=True, device="cuda", dtype=torch.float32 if autocast else torch.bfloat16)
    sampling = Sampler(model, decoding="captured", kept_bytes=2**30)
    with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
        for seed in range(5):
            prompt, mask = prompts(device="cuda")
            prompt = prompt.roll(seed, 0) * mask
            found = sampling(prompt, mask, options(4, 24), generator=seeded(seed, device="cuda"))
            assert found.decoding == "captured"
            expected = recomputed(model, prompt, mask, found, group=4)
            assert float((found.log_probs - expected)[found.mask].abs().mean()) < 0.03
    assert sampling._static is not None
    assert sampling._static._prompts is not None
    assert len(sampling._static._prompts._recordings) == 1
    assert sampling._static._prompts.nbytes > 0


@pytest.mark.gpu
def test_new_weights_are_not_read_by_old_recordings() -> None:
    model = language_model(device="cuda")
    prompt, mask = prompts(device="cuda")
    sampling = Sampler(model, decoding="captured", kept_bytes=2**30)
    for _ in range(4):
        sampling(prompt, mask, options(1, 8, temperature=0))
    for one in model.parameters():
        one.data = torch.randn_like(one) * 0.3
    found = sampling(prompt, mask, options(1, 8, temperature=0))
    assert torch.equal(found.ids, generated(model, prompt, mask, new=8))
