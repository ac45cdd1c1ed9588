"""Completions: the tokens of transformers, and the log-probabilities of the loss pass."""

import logging

import pytest
import torch

from lightning_unified.models.causal_lm.language_model import evaluating
from lightning_unified.models.grpo.rollout import Sampler, SamplingOptions
from tests.support.grpo.rollout import VOCABULARY, generated, language_model, options, prompts, recomputed, seeded

WAYS = ("static", "growing")


@pytest.mark.parametrize("decoding", WAYS)
@pytest.mark.parametrize("kind", ["Qwen2", "Llama"])
def test_greedy_completions_are_those_of_generate(kind: str, decoding: str) -> None:
    model, (prompt, mask) = language_model(kind), prompts()
    completions = Sampler(model, decoding=decoding)(prompt, mask, options(1, 20, temperature=0))
    assert completions.decoding == decoding
    assert torch.equal(completions.ids, generated(model, prompt, mask, new=20))


@pytest.mark.parametrize("decoding", WAYS)
@pytest.mark.parametrize("adapters", [False, True])
def test_log_probs_are_those_of_a_forward_over_everything(decoding: str, *, adapters: bool) -> None:
    model, (prompt, mask) = language_model(adapters=adapters), prompts()
    sampler = Sampler(model, stop_ids=range(6), decoding=decoding)
    completions = sampler(prompt, mask, options(4, 24, temperature=0.7), generator=seeded())
    expected = recomputed(model, prompt, mask, completions, group=4, temperature=0.7)
    torch.testing.assert_close(completions.log_probs, expected, rtol=1e-4, atol=1e-4)
    assert 0 < completions.ended.sum() <= 12


def test_longer_than_the_first_slots_it_goes_on_as_before() -> None:
    model, (prompt, mask) = language_model(), prompts(2, length=120)
    sampler = Sampler(model, decoding="static")
    completions = sampler(prompt, mask, options(2, 150), generator=seeded())
    expected = recomputed(model, prompt, mask, completions, group=2)
    torch.testing.assert_close(completions.log_probs, expected, rtol=1e-4, atol=1e-4)


def test_under_autocast_it_samples_from_what_autocast_computes() -> None:
    model, (prompt, mask) = language_model(adapters=True), prompts()
    with torch.autocast("cpu", torch.bfloat16):
        completions = Sampler(model, decoding="static")(prompt, mask, options(4, 24), generator=seeded())
        in_bf16 = recomputed(model, prompt, mask, completions, group=4)
    in_fp32 = recomputed(model, prompt, mask, completions, group=4)
    gap, other = ((completions.log_probs - one).abs().mean() for one in (in_bf16, in_fp32))
    assert gap < 0.5 * other


@pytest.mark.parametrize("decoding", WAYS)
def test_completions_end_with_the_first_stop_token(decoding: str) -> None:
    model, (prompt, mask) = language_model(), prompts()
    found = Sampler(model, stop_ids=(3, 4, 5, 6), decoding=decoding)(prompt, mask, options(8, 30), generator=seeded())
    stops = torch.isin(found.ids, torch.tensor([3, 4, 5, 6])) & found.mask
    assert torch.equal(stops.any(1), found.ended)
    assert found.ended.sum() > 0
    lengths = found.mask.sum(1)
    assert torch.equal(stops[found.ended].int().argmax(1) + 1, lengths[found.ended])
    assert (lengths[~found.ended] == 30).all()
    assert not found.ids[~found.mask].any()
    assert not found.log_probs[~found.mask].any()


def test_completions_end_with_the_stop_text() -> None:
    model, (prompt, mask) = language_model(), prompts()
    letters = [chr(ord("a") + one % 4) * (1 + one % 2) for one in range(VOCABULARY)]

    def decode(ids: list[int]) -> str:
        return "".join(letters[one] for one in ids)

    found = Sampler(model, stop_text="bc", decode=decode, decoding="static")(
        prompt, mask, options(8, 30), generator=seeded()
    )
    assert found.ended.sum() > 0
    for ids, there, ended in zip(found.ids, found.mask, found.ended, strict=True):
        tokens = ids[there].tolist()
        assert ("bc" in decode(tokens)) == bool(ended)
        assert "bc" not in decode(tokens[:-1])


@pytest.mark.parametrize("decoding", WAYS)
def test_rows_that_are_over_are_decoded_no_more(decoding: str) -> None:
    model, (prompt, mask) = language_model(), prompts()
    sampler, sizes = Sampler(model, stop_ids=range(12), decoding=decoding), list[int]()
    sampler(prompt, mask, options(1, 1))  # the first rollout checks a step of two rows
    model.model.layers[0].register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    sampler(prompt, mask, options(16, 60), generator=seeded())
    assert sizes[:2] == [3, 48]  # prompts once, then all rows
    assert sizes[1:] == sorted(sizes[1:], reverse=True)
    assert sizes[-1] < 12


def test_the_model_is_left_in_the_modes_it_was_in() -> None:
    model, (prompt, mask) = language_model(adapters=True), prompts()
    model.gradient_checkpointing_enable()
    model.get_base_model().model.layers[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    Sampler(model)(prompt, mask, options(2, 4))
    assert {name: module.training for name, module in model.named_modules()} == before
    assert model.get_base_model().config._attn_implementation == "sdpa"
    assert not any("forward" in vars(module) for module in model.get_base_model().model.layers)


def test_scripted_and_compiled_layers_are_in_eval_mode_too() -> None:
    layers = torch.nn.Sequential(
        torch.jit.script(torch.nn.Dropout(0.5)), torch.compile(torch.nn.Dropout(0.5), backend="eager")
    )
    ones = torch.ones(64)
    with evaluating(layers):
        assert all(torch.equal(layer(ones), ones) for layer in layers)
    assert not any(torch.equal(layer(ones), ones) for layer in layers)


def test_one_seed_gives_one_set_of_completions() -> None:
    model, (prompt, mask) = language_model(), prompts()
    sampler = Sampler(model)
    first, again, other = (sampler(prompt, mask, options(4, 12), generator=seeded(seed)).ids for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_completions_of_one_group_differ() -> None:
    model, (prompt, mask) = language_model(), prompts(1)
    found = Sampler(model)(prompt, mask, options(4, 12), generator=seeded())
    assert len({tuple(row) for row in found.ids.tolist()}) == 4


@pytest.mark.parametrize(("kept", "is_kept"), [(0, False), (2**30, True)])
def test_the_cache_is_freed_unless_it_may_stay(kept: int, *, is_kept: bool) -> None:
    model, (prompt, mask) = language_model(), prompts()
    sampler = Sampler(model, decoding="static", kept_bytes=kept)
    sampler(prompt, mask, options(2, 4))
    assert (sampler.cache_bytes > 0) == is_kept
    sampler.release()
    assert sampler.cache_bytes == 0


def test_how_much_may_stay_is_asked_at_the_end_of_each_call() -> None:
    model, (prompt, mask) = language_model(), prompts()
    answers = iter([2**30, 0, None])
    sampler, kept = Sampler(model, decoding="static", kept_bytes=lambda: next(answers)), []
    for _ in range(3):
        sampler(prompt, mask, options(2, 4))
        kept.append(sampler.cache_bytes > 0)
    assert kept == [True, False, False]  # None: 2 % of a tiny model


def test_another_temperature_is_drawn_at_over_the_same_cache() -> None:
    model, (prompt, mask) = language_model(), prompts()
    sampler = Sampler(model, decoding="static", kept_bytes=2**30)
    for temperature in (1.0, 0.4):
        found = sampler(prompt, mask, options(2, 8, temperature=temperature), generator=seeded())
        expected = recomputed(model, prompt, mask, found, group=2, temperature=temperature)
        torch.testing.assert_close(found.log_probs, expected, rtol=1e-4, atol=1e-4)
        static = vars(sampler)["_static"]
        places = [one.data_ptr() for layer in static._storage._layers for one in layer]
        assert places == vars(sampler).setdefault("places", places)


def test_a_cache_that_stayed_serves_other_sizes() -> None:
    model = language_model()
    sampler = Sampler(model, decoding="static", kept_bytes=2**30)
    for count, length, group in ((3, 9, 4), (2, 5, 2), (4, 30, 4)):
        prompt, mask = prompts(count, length=length)
        found = sampler(prompt, mask, options(group, 20), generator=seeded())
        expected = recomputed(model, prompt, mask, found, group=group)
        torch.testing.assert_close(found.log_probs, expected, rtol=1e-4, atol=1e-4)


def test_weights_that_were_trained_meanwhile_are_sampled_from() -> None:
    model, (prompt, mask) = language_model(adapters=True), prompts()
    sampler = Sampler(model, decoding="static", kept_bytes=2**30)
    sampler(prompt, mask, options(2, 8))
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_B" in name:
                one.neg_()
    found = sampler(prompt, mask, options(2, 8), generator=seeded())
    expected = recomputed(model, prompt, mask, found, group=2)
    torch.testing.assert_close(found.log_probs, expected, rtol=1e-4, atol=1e-4)


def test_sliding_windows_are_decoded_over_the_models_own_cache(caplog: pytest.LogCaptureFixture) -> None:
    model, (prompt, mask) = language_model("Mistral", sliding_window=8), prompts(length=12)
    sampler = Sampler(model)
    with caplog.at_level(logging.WARNING, logger="lightning_unified"):
        found = sampler(prompt, mask, options(1, 12, temperature=0))
        sampler(prompt, mask, options(1, 2, temperature=0))
    assert found.decoding == "growing"
    assert torch.equal(found.ids, generated(model, prompt, mask, new=12))
    assert sum("growing cache" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decoding": "statik"}, "static"),
        ({"stop_text": "</guess>"}, "needs .* decode"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(language_model(), **settings)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1.0), ("top_p", 0.0), ("top_k", -1), ("group_size", 0), ("max_new_tokens", 0)]
)
def test_options_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        SamplingOptions(**{name: value})  # pyright: ignore[reportArgumentType]


def test_a_module_without_logits_is_refused() -> None:
    with pytest.raises(ValueError, match="no causal language model"):
        Sampler(torch.nn.Linear(2, 2))


def test_prompts_padded_on_the_right_are_refused() -> None:
    prompt, mask = prompts()
    with pytest.raises(ValueError, match="on the left"):
        Sampler(language_model())(prompt, mask.flip(1), options(1, 4))


def test_more_tokens_than_there_are_positions_are_refused() -> None:
    prompt, mask = prompts()
    with pytest.raises(ValueError, match="320 positions"):
        Sampler(language_model())(prompt, mask, options(1, 320))


def test_graphs_are_refused_without_cuda() -> None:
    prompt, mask = prompts()
    with pytest.raises(ValueError, match="records CUDA graphs"):
        Sampler(language_model(), decoding="captured")(prompt, mask, options(1, 4))


def test_options_are_given_as_an_object_or_by_name() -> None:
    model, (prompt, mask) = language_model(), prompts()
    sampler = Sampler(model)
    given = sampler(prompt, mask, SamplingOptions(group_size=2, max_new_tokens=5), generator=seeded())
    named = sampler(prompt, mask, group_size=2, max_new_tokens=5, generator=seeded())
    changed = sampler(prompt, mask, SamplingOptions(group_size=2), max_new_tokens=5, generator=seeded())
    assert torch.equal(given.ids, named.ids)
    assert torch.equal(given.ids, changed.ids)
    with pytest.raises(TypeError, match="max_tokens"):
        sampler(prompt, mask, max_tokens=5)
