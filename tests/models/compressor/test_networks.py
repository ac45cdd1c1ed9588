"""Policy, reader and layouts: parameter counts, inputs of each decision, padding.

Padding changes nothing.
"""

import pytest
import torch

from lightning_unified.models.compressor.network.codec import keep_top
from lightning_unified.models.compressor.network.policy import KeepPolicy
from lightning_unified.models.compressor.network.reader import Reader
from lightning_unified.models.compressor.network.slots import compact, followed_by, with_separator
from lightning_unified.models.compressor.sizes import PRESETS, PolicyConfig, preset


def test_the_125m_preset_is_the_seeds_policy_and_gpt2_small():
    chosen = PRESETS["compressor-125m"]
    with torch.device("meta"):
        policy = KeepPolicy(chosen.policy, width=768)
        reader = Reader(chosen.reader)

    assert sum(parameter.numel() for parameter in policy.parameters()) == 865_281
    assert sum(parameter.numel() for parameter in reader.parameters()) == 124_439_808


@pytest.mark.parametrize(("window", "count"), [(8, 865_281), (5, 668_673), (4, 603_137), (2, 472_065)])
def test_the_policys_formula_gives_the_seeds_counts(window, count):
    assert PolicyConfig(positions=512, window=window).parameters(768) == count


COUNTS = {
    "compressor-tiny": (7_441, 28_800),
    "compressor-small": (179_777, 560_640),
    "compressor-125m": (865_281, 124_439_808),
    "compressor-smollm2": (816_129, None),  # its reader is counted in test_pretrained.py
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_the_parameters_stated_beside_it(name):
    config = preset(name)
    policy, reader = COUNTS[name]
    with torch.device("meta"):
        assert sum(p.numel() for p in KeepPolicy(config.policy, width=config.reader.width).parameters()) == policy
        if config.pretrained is None:
            assert sum(p.numel() for p in Reader(config.reader).parameters()) == reader


@pytest.mark.parametrize(("window", "reach"), [(8, range(6, 14)), (5, range(8, 13)), (1, range(10, 11))])
def test_a_decision_sees_its_window_and_no_more(window, reach):
    policy = KeepPolicy(PolicyConfig(positions=20, window=window, width=64), width=6)
    embeddings = torch.randn(1, 20, 6, requires_grad=True)
    policy(embeddings, torch.ones(1, 20, dtype=torch.bool))[0, 10].backward()
    seen = embeddings.grad[0].abs().sum(1).nonzero().flatten().tolist()

    assert seen == list(reach)


def test_decisions_of_a_text_are_those_of_the_text_without_pads(build, batch):
    model = build()
    ids, mask = batch["input_ids"], batch["mask"]
    together = model.keep_logits(ids, mask)
    for row, length in enumerate(mask.sum(1).tolist()[:5]):
        alone = model.keep_logits(ids[row : row + 1, :length], mask[row : row + 1, :length])
        torch.testing.assert_close(alone[0], together[row, :length], rtol=1e-12, atol=1e-12)


def test_a_text_longer_than_the_policys_positions_is_refused(build):
    ids = torch.ones(1, 33, dtype=torch.int64)
    with pytest.raises(ValueError, match="33 tokens; this policy has 32 positions"):
        build().keep_logits(ids, ids > 0)


@pytest.mark.parametrize("reading", ["infill", "copy"])
def test_what_is_restored_depends_on_kept_tokens_and_not_on_dropped_ones_to_come(build, batch, reading):
    model, ids, mask = build(reading=reading).eval(), batch["input_ids"][:1], batch["mask"][:1]
    keep = torch.ones_like(mask)
    keep[0, 6] = keep[0, 9] = False
    restored = model.reconstruct(ids, keep, mask)
    dropped, kept = ids.clone(), ids.clone()
    dropped[0, 9], kept[0, 10] = 5, 5

    torch.testing.assert_close(model.reconstruct(dropped, keep, mask)[:, :9], restored[:, :9])
    assert not torch.allclose(model.reconstruct(kept, keep, mask)[:, 6], restored[:, 6])


def test_infill_knows_nothing_of_a_dropped_token(build, batch):
    model, ids, mask = build(reading="infill").eval(), batch["input_ids"][:1], batch["mask"][:1]
    keep = torch.arange(12).unsqueeze(0) % 2 == 0
    other = torch.where(keep, ids, 7)

    torch.testing.assert_close(model.reconstruct(other, keep, mask), model.reconstruct(ids, keep, mask))


def test_a_next_token_depends_on_what_is_before_it_only(build, batch):
    model, ids, mask = build(), batch["input_ids"], batch["mask"]
    other = ids.clone()
    other[0, 8] = 5
    changed = (model.next_logits(other, mask) - model.next_logits(ids, mask))[0].abs().sum(-1)

    assert changed[:8].max() < 1e-12 < changed[8:].min()


def test_a_continuation_is_read_after_the_kept_tokens_alone(build, batch):
    """Dropped tokens leave no trace: the reader reads fewer tokens."""
    model, ids = build(), batch["input_ids"][:1]
    keep = torch.arange(12).unsqueeze(0) % 3 == 0
    follow, follow_mask = batch["continuation"][:1], batch["continuation_mask"][:1]
    every, short = torch.ones(1, 12, dtype=torch.bool), torch.ones(1, 4, dtype=torch.bool)
    given = model.continue_logits(ids, keep.double(), every, follow, follow_mask)
    shorter = model.continue_logits(ids[keep].unsqueeze(0), short, short, follow, follow_mask)

    torch.testing.assert_close(given, shorter, rtol=1e-12, atol=1e-12)


def test_real_slots_move_to_the_front_in_their_order():
    values = torch.arange(5.0).view(1, 5, 1)
    real = torch.tensor([[False, True, False, True, True]])
    layout = compact(values, real=real)

    assert layout.embeddings.flatten().tolist() == [1, 3, 4, 0, 2]
    assert torch.equal(layout.back(layout.embeddings), values)
    assert layout.at_front(torch.tensor([[10, 11, 12, 13, 14]])).tolist() == [[11, 13, 14, 10, 12]]


def test_the_separator_stands_between_a_text_and_its_copy_without_the_last_token():
    text, real = torch.tensor([1.0, 2.0, 0.0]).view(1, 3, 1), torch.tensor([[True, True, False]])
    layout = followed_by(text, text, first_real=real, second_real=real, separator=torch.tensor([9.0]))

    assert layout.embeddings.flatten()[:4].tolist() == [1, 2, 9, 1]


def test_the_separator_stands_where_the_language_models_part_begins():
    text, every = torch.arange(1.0, 6.0).view(1, 5, 1), torch.ones(1, 5, dtype=torch.bool)
    keep = torch.tensor([[True, False, True, True, True]])
    rows = [
        with_separator(text, keep=keep, mask=every, starts=torch.tensor([start]), separator=torch.tensor([9.0]))
        for start in (0, 3)
    ]

    assert rows[0].embeddings.flatten().tolist() == [9, 1, 2, 3, 4]
    assert rows[1].embeddings.flatten()[:4].tolist() == [1, 3, 9, 4]


def test_a_budgets_tokens_are_exactly_as_many_as_it_allows_with_the_highest_logits():
    logits = torch.tensor([[0.1, 0.9, 0.5, 0.7, 99.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True, True, False], [True] * 5])

    assert keep_top(logits, mask=mask, ratio=0.5).tolist() == [
        [False, True, False, True, False],
        [True, True, False, False, False],
    ]
    with pytest.raises(ValueError, match=r"a keep ratio of 1\.5 is not a share"):
        keep_top(logits, mask=mask, ratio=1.5)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="did you mean compressor-small"):
        preset("compressor-smal")
    with pytest.raises(ValueError, match="need 256 positions; the reader has 200"):
        preset("compressor-small", positions=200)
    with pytest.raises(ValueError, match="valid head counts: 1, 2, 4, 8, 16, 32"):
        preset("compressor-tiny", heads=3)
    with pytest.raises(ValueError, match="reading='infil' is not offered"):
        preset("compressor-tiny", reading="infil")
