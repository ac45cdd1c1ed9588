"""The joint loss: exact when split, independent of padding, with the right gradients."""

import itertools

import pytest
import torch

from lightning_unified.models.compressor.objective import estimators as objectives
from tests.support.lanes import first_cells, slow, some

KINDS = list(itertools.product(("reinforce", "relaxed"), ("restore", "predict"), ("infill", "copy")))


def _part(batch, start, stop):
    return {name: values[start:stop] if values.ndim else values for name, values in batch.items()}


def _close(ours, theirs, bound=1e-12):
    assert ours.keys() == theirs.keys()
    for name, reference in theirs.items():
        if reference is None:
            assert ours[name] is None, name
        else:
            assert (ours[name] - reference).norm() <= bound * max(reference.norm(), 1e-6), name


@first_cells(1, ("objective", "target", "reading"), some(KINDS, *KINDS[::3]))
def test_gradients_of_micro_batches_add_up_to_those_of_the_whole(build, batch, gradients, objective, target, reading):
    model = build(objective=objective, target=target, reading=reading, masks=3, kept_weight=0.1)
    prepared = model.prepare_batch(batch)
    whole = model.training_step(prepared)
    reference = gradients(model, whole["loss"])
    for rows in (1, 4):
        model.zero_grad()
        parts = [model.training_step(_part(prepared, start, start + rows)) for start in range(0, 6, rows)]
        _close(gradients(model, sum(part["loss"] for part in parts)), reference)
        for name in ("loss", "distortion", "language"):
            torch.testing.assert_close(sum(part[name] for part in parts), whole[name], rtol=1e-12, atol=0)
        for name in ("kept", "tokens", "spread", "texts"):
            torch.testing.assert_close(torch.cat([part[name] for part in parts]), whole[name], rtol=1e-12, atol=0)


@first_cells(3, ("objective", "target", "reading"), KINDS)
def test_pads_change_no_loss_and_no_gradient(build, batch, gradients, padded, objective, target, reading):
    model = build(objective=objective, target=target, reading=reading)
    prepared = model.prepare_batch(batch)
    plain, more = model.training_step(prepared), model.training_step(padded(prepared))

    for name in ("loss", "distortion", "language"):
        torch.testing.assert_close(more[name], plain[name], rtol=1e-12, atol=0)
    for name in ("kept", "tokens", "texts"):
        torch.testing.assert_close(more[name].sum(), plain[name].sum(), rtol=1e-12, atol=0)
    _close(gradients(model, more["loss"]), gradients(model, plain["loss"]))


@pytest.mark.parametrize("reading", ["infill", "copy"])
def test_the_reader_learns_the_same_whatever_the_rewards(build, batch, gradients, monkeypatch, reading):
    """The policy's part sends no gradient to the reader.

    Neither the reward nor the embeddings that it reads pass one.
    """
    model = build(objective="reinforce", reading=reading)
    prepared = model.prepare_batch(batch)
    honest = gradients(model, model.training_step(prepared)["loss"])
    monkeypatch.setattr(objectives, "advantages", lambda rewards: rewards * 1e6)
    other = gradients(model, model.training_step(prepared)["loss"])

    for name, gradient in honest.items():
        policy = name.startswith("codec.policy")
        assert torch.equal(gradient, other[name]) != policy, name


@pytest.mark.parametrize("objective", ["reinforce", "relaxed"])
def test_a_gradient_reaches_every_parameter(build, batch, gradients, objective):
    model = build(objective=objective, reading="copy")
    found = gradients(model, model.training_step(batch)["loss"])
    unread = {
        "codec.policy.positions.weight",
        "codec.reader.position_embedding.weight",
    }  # rows beyond the texts' length

    assert [name for name, gradient in found.items() if not gradient.any()] == []
    assert [name for name, gradient in found.items() if not gradient.isfinite().all()] == []
    assert unread <= found.keys()


@pytest.mark.parametrize("target", ["restore", "predict"])
def test_every_parameter_takes_part_whatever_is_read(build, batch, gradients, target):
    model = build(objective="reinforce", target=target, language_weight=0.0)

    assert None not in gradients(model, model.training_step(batch)["loss"]).values()


def test_relaxed_masks_teach_the_policy_and_hard_ones_the_reader_only(build, batch, gradients):
    model = build(objective="relaxed", masks=3, language_weight=0.0)
    prepared = model.prepare_batch(batch)
    other = {**prepared, "noise": prepared["noise"].clone()}
    other["noise"][:, 2:] = 1 - other["noise"][:, 2:]
    found = [gradients(model, model.training_step(one)["loss"]) for one in (prepared, other)]

    assert [build(masks=count).joint.soft_masks for count in (1, 2, 3)] == [1, 1, 2]
    for name, gradient in found[0].items():
        if name != "codec.separator":
            assert torch.allclose(gradient, found[1][name], rtol=1e-9, atol=1e-15) == name.startswith("codec.policy"), (
                name
            )


def test_a_sampled_gradient_is_on_average_that_of_the_expected_distortion():
    """Compare all masks of three tokens, by probability, with the explicit sum's gradient."""
    logits = torch.tensor([[0.3, -0.7, 1.1]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    masks = torch.tensor(list(itertools.product((False, True), repeat=3)))
    costs = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    chances = objectives.log_probability(logits, keep=masks.unsqueeze(0), mask=mask)[0].exp()
    expected = torch.autograd.grad((chances * costs).sum(), logits)[0]
    estimated = torch.zeros_like(expected)
    for one, two in itertools.product(range(8), repeat=2):
        keep, distortion = masks[[one, two]].unsqueeze(0), costs[[one, two]].unsqueeze(0)
        term = objectives.reinforce(logits, keep=keep, distortion=distortion, mask=mask).sum()
        estimated += (chances[one] * chances[two]).detach() * torch.autograd.grad(term, logits)[0]

    assert chances.sum().item() == pytest.approx(1.0)
    torch.testing.assert_close(estimated, expected, rtol=1e-12, atol=1e-14)


def test_the_others_of_a_text_are_each_masks_baseline():
    rewards = torch.tensor([[1.0, 2.0, 6.0], [3.0, 3.0, 3.0]])

    torch.testing.assert_close(objectives.advantages(rewards), torch.tensor([[-3.0, -1.5, 4.5], [0.0, 0.0, 0.0]]))


def test_the_best_logit_is_a_tokens_saving_less_price_over_the_entropy_weight():
    logit = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    mask, price, saves, weight = torch.ones(1, 1, dtype=torch.bool), torch.tensor(2.0), 3.5, 0.5
    optimizer = torch.optim.LBFGS([logit], max_iter=50, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        rate = objectives.rate_terms(logit, mask=mask, price=price, entropy_weight=weight)
        loss = rate.sum() + saves * (1 - torch.sigmoid(logit)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert logit.item() == pytest.approx((saves - 2.0) / weight, abs=1e-4)


def test_entropy_is_exact_and_finite_at_the_extremes():
    logits = torch.tensor([0.0, 2.0, -2.0, 80.0, -80.0], dtype=torch.float64)
    chance = torch.sigmoid(logits[:3])
    plain = -(chance * chance.log() + (1 - chance) * (1 - chance).log())

    torch.testing.assert_close(objectives.binary_entropy(logits)[:3], plain)
    assert objectives.binary_entropy(logits)[3:].tolist() == pytest.approx([0.0, 0.0], abs=1e-30)


def test_half_of_the_texts_are_read_from_the_beginning_and_none_past_the_end(build, batch):
    torch.manual_seed(0)
    lengths = batch["mask"].sum(1)
    model = build()
    starts = torch.stack([model.prepare_batch(batch)["starts"] for _ in range(200)])[:, :5]

    assert (starts.amax(0) == lengths[:5] - 1).all()
    assert 0.5 < (starts == 0).double().mean() < 0.7


def test_predicting_without_continuations_is_refused(build, batch):
    with pytest.raises(ValueError, match=r"set data\.continuation_length above 0"):
        build(target="predict").prepare_batch({name: batch[name] for name in ("input_ids", "mask")})


def test_a_batch_of_pads_costs_nothing(build, batch, gradients):
    for objective in ("reinforce", "relaxed"):
        model = build(objective=objective)
        terms = model.training_step({name: torch.zeros_like(values) for name, values in batch.items()})

        assert terms["loss"].item() == 0.0
        assert all(gradient is None or not gradient.any() for gradient in gradients(model, terms["loss"]).values())


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "reading"), [slow("reinforce", "infill"), ("relaxed", "copy")])
def test_four_texts_are_learnt_by_heart(build, batch, objective, reading):
    model = build(objective=objective, reading=reading, language_weight=0.0).float()
    four = {name: values[:4] for name, values in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    for _ in range(70):
        terms = model.training_step(four)
        optimizer.zero_grad()
        terms["loss"].backward()
        optimizer.step()
    keep = model.keep_logits(four["input_ids"], four["mask"]) > 0

    assert terms["distortion"].item() < 0.3
    assert keep[0].logical_not().any() or keep[1].logical_not().any()


@pytest.mark.parametrize("objective", ["reinforce", "relaxed"])
def test_a_text_with_lowered_log_odds_is_dropped_but_not_its_expected_ratio(build, batch, objective):
    model = build(objective=objective)
    prepared = model.prepare_batch(batch)
    assert 0 < prepared["shifts"].abs().max() <= 2
    found = [model.training_step({**prepared, "shifts": torch.full((6,), shift)}) for shift in (60.0, -60.0)]

    assert found[0]["distortion"].item() < 1e-9
    assert found[1]["distortion"].item() > 5
    assert torch.equal(found[0]["kept"], found[1]["kept"])
