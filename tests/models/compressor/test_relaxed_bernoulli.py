"""Keep-or-drop gates: the right chance of keeping, the right gradient, and one tensor kept."""

import pytest
import torch

from lightning_unified.models.compressor.objective.relaxed_bernoulli import hard_bernoulli, relaxed_bernoulli

DRAWS = 200_000


@pytest.mark.parametrize("logit", [-3.0, -1.0, 0.0, 1.0, 3.0])
@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
def test_a_gate_is_above_a_half_with_the_sigmoid_of_its_logit_as_probability(logit, temperature):
    uniform = torch.rand(DRAWS, generator=torch.Generator().manual_seed(7))
    gates = relaxed_bernoulli(torch.full((DRAWS,), logit), uniform=uniform, temperature=temperature)
    chance = torch.sigmoid(torch.tensor(logit)).item()
    error = (chance * (1 - chance) / DRAWS) ** 0.5

    assert abs((gates > 0.5).double().mean().item() - chance) < 4 * error


def test_the_noise_is_distributed_as_the_difference_of_two_gumbel_numbers():
    generator = torch.Generator().manual_seed(3)
    one, two, uniform = (torch.rand(DRAWS, generator=generator, dtype=torch.float64) for _ in range(3))
    gumbels = -torch.log(-torch.log(one)) + torch.log(-torch.log(two))
    gates = relaxed_bernoulli(torch.zeros(DRAWS, dtype=torch.float64), uniform=uniform, temperature=1.0)
    logistic, grid = torch.logit(gates), torch.linspace(-6, 6, 49, dtype=torch.float64)
    shares = [(values.unsqueeze(0) < grid.unsqueeze(1)).double().mean(1) for values in (gumbels, logistic)]

    assert (shares[0] - shares[1]).abs().max() < 1.63 * (2 / DRAWS) ** 0.5  # Kolmogorov and Smirnov's bound at 1 %
    assert (shares[1] - torch.sigmoid(grid)).abs().max() < 1.63 / DRAWS**0.5


def test_a_decision_is_where_the_gate_of_the_same_number_is_above_a_half():
    generator = torch.Generator().manual_seed(1)
    logits, uniform = torch.randn(3, 1, 50, generator=generator), torch.rand(3, 4, 50, generator=generator)

    assert torch.equal(
        hard_bernoulli(logits, uniform=uniform), relaxed_bernoulli(logits, uniform=uniform, temperature=0.3) > 0.5
    )


def test_the_gradient_is_that_of_the_plain_formula_also_where_masks_share_logits():
    logits = torch.randn(3, 1, 7, dtype=torch.float64, requires_grad=True)
    uniform = torch.rand(3, 4, 7, dtype=torch.float64).clamp(0.01, 0.99)

    assert torch.autograd.gradcheck(lambda z: relaxed_bernoulli(z, uniform=uniform, temperature=0.7), (logits,))
    plain = torch.sigmoid((logits + torch.log(uniform) - torch.log1p(-uniform)) / 0.7)
    torch.testing.assert_close(relaxed_bernoulli(logits, uniform=uniform, temperature=0.7), plain)


def test_the_backward_pass_keeps_the_gates_and_nothing_else():
    kept = []
    logits = torch.randn(4, 9, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        gates = relaxed_bernoulli(logits, uniform=torch.rand(4, 9), temperature=0.5)

    assert [tensor.data_ptr() for tensor in kept] == [gates.data_ptr()]


def test_the_extremes_of_a_uniform_number_give_finite_noise():
    gates = relaxed_bernoulli(torch.zeros(2), uniform=torch.tensor([0.0, 1.0]), temperature=1.0)

    assert torch.logit(gates).isfinite().all()


def test_the_uniform_numbers_are_left_as_they_are():
    uniform = torch.rand(50)
    before = uniform.clone()
    relaxed_bernoulli(torch.zeros(50), uniform=uniform, temperature=0.5)

    assert torch.equal(uniform, before)


def test_a_temperature_of_zero_is_refused():
    with pytest.raises(ValueError, match="temperature=0 must be above 0"):
        relaxed_bernoulli(torch.zeros(1), uniform=torch.zeros(1), temperature=0)
