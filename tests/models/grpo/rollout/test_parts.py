"""What a sampler is made of: drawing, stopping, slots, adapters beside their matrices."""

import pytest
import torch

from lightning_unified.models.causal_lm.language_model import causal_lm
from lightning_unified.models.grpo.rollout.few_rows.layers import reading_weights_once
from lightning_unified.models.grpo.rollout.progress import Stopping
from lightning_unified.models.grpo.rollout.sampling import SamplingOptions, draw
from lightning_unified.models.grpo.rollout.static_cache import Storage
from lightning_unified.models.grpo.rollout.static_decoder import StaticDecoder, slots_for
from lightning_unified.models.pretrained.architecture import blocks_of
from tests.support.grpo.rollout import language_model, prompts

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])


def drawn(options: SamplingOptions, *, count: int = 20000) -> torch.Tensor:
    tokens, _ = draw(LOGITS.expand(count, 4), options, generator=torch.Generator().manual_seed(0))
    return tokens.bincount(minlength=4) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_the_softmax_says(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    torch.testing.assert_close(drawn(SamplingOptions(temperature=temperature)), expected, atol=0.012, rtol=0)


def test_top_k_draws_among_the_likeliest_in_their_proportions() -> None:
    expected = torch.cat([LOGITS[:2].softmax(-1), torch.zeros(2)])
    torch.testing.assert_close(drawn(SamplingOptions(top_k=2)), expected, atol=0.012, rtol=0)


def test_top_p_draws_among_the_fewest_that_reach_it() -> None:
    shares = LOGITS.softmax(-1).cumsum(-1)
    expected = torch.cat([LOGITS[:2].softmax(-1), torch.zeros(2)])
    between = float(shares[:2].mean())
    torch.testing.assert_close(drawn(SamplingOptions(top_p=between)), expected, atol=0.012, rtol=0)


def test_what_may_be_drawn_does_not_change_the_log_probability() -> None:
    logits = LOGITS.expand(50, 4)
    tokens, log_probs = draw(logits, SamplingOptions(temperature=0.5, top_k=2, top_p=0.9))
    torch.testing.assert_close(log_probs, (logits / 0.5).log_softmax(-1).gather(-1, tokens[:, None])[:, 0])


def test_a_stop_text_is_found_however_it_is_cut_into_tokens() -> None:
    pieces = ["x", "</", "guess", ">", "ss>\n", "</gue", "</guess>"]
    stopping = Stopping(text="</guess>", decode=lambda ids: "".join(pieces[one] for one in ids))
    assert [stopping.ends(tokens) for tokens in ([1, 2, 3], [0, 5, 4], [0, 6])] == [True, True, True]
    assert [stopping.ends(tokens) for tokens in ([1, 2], [2, 3], [0, 4], [1, 2, 0, 3])] == [False] * 4


@pytest.mark.parametrize(
    ("length", "most", "slots"), [(5, 40, 128), (129, 1000, 256), (257, 1000, 512), (600, 700, 768), (225, 320, 384)]
)
def test_slots_are_few_lengths_and_no_more_than_needed(length: int, most: int, slots: int) -> None:
    assert slots_for(length, most=most) == slots


@pytest.mark.parametrize(("live", "rows"), [(65, 256), (64, 64), (20, 32), (3, 16)])
def test_recorded_steps_go_on_with_few_numbers_of_rows(live: int, rows: int) -> None:
    decoder = StaticDecoder(language_model(), captured=True, compiled=False)
    decoder.rows = 256
    assert decoder.rows_worth_keeping(live) == rows


def test_rows_that_are_kept_move_within_the_same_memory() -> None:
    like = [(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3))]
    storage = Storage(like, slots=4 * 8, dtype=torch.float32)
    storage.fill([(torch.rand(2, 2, 5, 3), torch.rand(2, 2, 5, 3))], group=2, length=8)
    before = [one.clone() for one in storage.views(rows=4, length=8)[0]]
    address = storage.views(rows=4, length=8)[0][0].data_ptr()
    storage.move(rows=4, length=8, kept=torch.tensor([1, 3]), to_length=16)
    for old, new in zip(before, storage.views(rows=2, length=16)[0], strict=True):
        assert torch.equal(new[:, :, :8], old[[1, 3]])
        assert not new[:, :, 8:].any()
    assert storage.views(rows=2, length=16)[0][0].data_ptr() == address


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_adapters_beside_their_weights_compute_what_peft_computes(adapters: torch.dtype) -> None:
    model, (prompt, mask) = language_model(adapters=True, dtype=torch.bfloat16).eval(), prompts()
    for name, weight in model.named_parameters():
        if "lora" in name:
            weight.data = weight.data.to(adapters)
    with torch.no_grad():
        expected = model(input_ids=prompt, attention_mask=mask.long()).logits
        with reading_weights_once(blocks_of(causal_lm(model)), rows=3):
            found = model(input_ids=prompt, attention_mask=mask.long()).logits
        with model.disable_adapter():
            without = model(input_ids=prompt, attention_mask=mask.long()).logits
    error = (found - expected)[mask].abs().mean()
    assert error < 0.01 * (without - expected)[mask].abs().mean()
    assert not any("forward" in vars(module) for module in model.modules() if "lora" in type(module).__module__)


def test_adapters_that_are_switched_off_stay_off() -> None:
    model, (prompt, mask) = language_model(adapters=True, dtype=torch.bfloat16).eval(), prompts()
    with torch.no_grad(), model.disable_adapter():
        expected = model(input_ids=prompt, attention_mask=mask.long()).logits
        with reading_weights_once(blocks_of(causal_lm(model)), rows=3):
            found = model(input_ids=prompt, attention_mask=mask.long()).logits
    assert torch.equal(found, expected)
