"""The network: what its output depends on, and what recomputation must not change."""

import pytest
import torch

from lightning_unified.models.gearhead.network import GearHeadNetwork
from lightning_unified.models.gearhead.sizes import preset


@pytest.fixture
def network(build):
    return build().network.eval()


def test_the_output_depends_on_the_tokens_before_it(network):
    ids = torch.arange(10, 20).unsqueeze(0)
    other = ids.clone()
    other[0, 0] = 99
    assert not torch.allclose(network(ids)[0, -1], network(other)[0, -1])


def test_the_output_does_not_depend_on_the_tokens_after_it(network):
    ids = torch.arange(10, 20).unsqueeze(0)
    other = ids.clone()
    other[0, -1] = 99
    torch.testing.assert_close(network(ids)[0, :-1], network(other)[0, :-1])


def test_the_output_depends_on_the_position(network):
    out = network(torch.full((1, 4), 17))
    assert not torch.allclose(out[0, 1], out[0, 3])


def test_the_output_depends_on_the_error_code(network):
    ids, codes = torch.arange(10, 20).unsqueeze(0), torch.zeros(1, 10, dtype=torch.int64)
    codes[0, 3] = 88
    with_code, without = network(ids, codes), network(ids)

    assert torch.equal(with_code[0, :3], without[0, :3])
    assert not torch.allclose(with_code[0, 3:], without[0, 3:])


def test_no_codes_is_row_zero_and_adds_nothing(network):
    ids = torch.arange(10, 20).unsqueeze(0)
    assert torch.equal(network(ids), network(ids, torch.zeros_like(ids)))
    assert not network.error_embedding.weight[0].any()


def test_without_codes_the_error_table_has_a_gradient_of_zeros(network):
    network(torch.arange(10, 20).unsqueeze(0)).sum().backward()
    assert not network.error_embedding.weight.grad.any()


def test_the_head_is_the_token_table(network):
    hidden = network(torch.arange(10, 20).unsqueeze(0))
    assert torch.equal(network.logits(hidden), hidden @ network.token_embedding.weight.T)


def test_reading_in_steps_with_a_cache_equals_reading_at_once(build):
    network = build().network.eval().double()
    ids = torch.randint(0, 300, (2, 9))
    cache = network.new_cache(batch=2, length=9)
    parts = [network(ids[:, :4], cache=cache)]
    parts += [network(ids[:, t : t + 1], cache=cache) for t in range(4, 9)]
    torch.testing.assert_close(torch.cat(parts, 1), network(ids), rtol=1e-12, atol=1e-12)


def test_recomputation_changes_no_key_of_the_state():
    config = preset("gearhead-small")
    with torch.device("meta"):
        assert list(GearHeadNetwork(config, recompute=True).state_dict()) == list(GearHeadNetwork(config).state_dict())


def test_recomputation_changes_no_bit_of_the_gradients_even_with_dropout(build, batch):
    gradients = []
    for recompute in (False, True):
        model = build(dropout=0.2, recompute=recompute)
        torch.manual_seed(11)
        model.training_step(batch).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_depth_scaling_divides_the_projections_by_the_root_of_twice_the_depth():
    config = preset("gearhead-small", depth_scaled_init=True)
    network = GearHeadNetwork(config)
    scaled, plain = network.blocks[0].feed_forward.projection.weight.std(), network.blocks[0].attention.qkv.weight.std()
    torch.testing.assert_close(plain / scaled, torch.tensor(8.0).sqrt(), rtol=0.02, atol=0)


def test_a_text_longer_than_the_positions_is_refused(network):
    with pytest.raises(ValueError, match="97 tokens; this network has 96 positions"):
        network(torch.zeros(1, 97, dtype=torch.int64))
    assert network(torch.zeros(1, 96, dtype=torch.int64)).shape == (1, 96, 32)


def test_several_tokens_behind_a_filled_cache_need_a_mask(network):
    cache = network.new_cache(batch=1, length=9)
    network(torch.zeros(1, 3, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match="need a mask"):
        network(torch.zeros(1, 2, dtype=torch.int64), cache=cache)


def test_a_text_model_has_no_diagnosis_to_give(build):
    network = build("gearhead-text").network
    with pytest.raises(ValueError, match="no diagnostic head"):
        network.diagnose(torch.zeros(1, 32))
