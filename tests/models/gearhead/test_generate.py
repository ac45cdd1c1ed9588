"""Generation against the plain argmax loop, and the rules by which tokens are drawn."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_unified.data.documents.record import EOS_ID
from lightning_unified.models.causal_lm.sampling import Sampling
from lightning_unified.models.gearhead.generate import generate
from lightning_unified.nn.token_log_probs import filter_logits

GREEDY = Sampling(max_new_tokens=20, temperature=0)


def _argmax_loop(network, prompt, *, codes, steps, ban=()):
    ids = list(prompt)
    for _ in range(steps):
        rows = torch.tensor([codes + [0] * (len(ids) - len(codes))])
        logits = network.logits(network(torch.tensor([ids]), rows))[0, -1]
        logits[list(ban)] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == EOS_ID:
            return ids[len(prompt) : -1]
    return ids[len(prompt) :]


@pytest.fixture
def network(build):
    """Weights large enough that greedy text does not settle on one token."""
    network = build().network.eval().double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return network


PROMPTS = [[1, 50, 60, 70], [1, 20], [1, 33, 44, 55, 66, 77, 88]]
CODES = [[0, 0, 88, 0], [0, 7], [0, 0, 0, 5, 5, 0, 0]]


def test_cached_greedy_text_equals_the_argmax_loop_for_a_ragged_batch(network):
    expected = [_argmax_loop(network, prompt, codes=row, steps=20) for prompt, row in zip(PROMPTS, CODES, strict=True)]
    assert generate(network, PROMPTS, error_code_ids=CODES, sampling=GREEDY) == expected
    assert len({tuple(answer) for answer in expected}) == 3


def test_each_text_stops_at_its_own_end(network):
    free = generate(network, PROMPTS, sampling=GREEDY)
    end = free[0][3]
    with torch.no_grad():  # exchange the rows of </s> and the fourth token: where that stood, </s> now stands
        table = network.token_embedding.weight
        table[[EOS_ID, end]] = table[[end, EOS_ID]]
    stopped = generate(network, PROMPTS, sampling=GREEDY)

    assert stopped[0] == free[0][: free[0].index(end)]
    for answer, row, prompt in zip(stopped, CODES, PROMPTS, strict=True):
        assert answer == _argmax_loop(network, prompt, codes=[0] * len(row), steps=20)


def test_a_text_ends_where_the_positions_do(network):
    prompts = [[1] * 90, [1, 20]]
    answers = generate(network, prompts, sampling=Sampling(max_new_tokens=200, temperature=0))
    assert all(len(prompt) + len(answer) <= 96 for prompt, answer in zip(prompts, answers, strict=True))
    assert len(answers[0]) == 6 or EOS_ID in answers[0]


def test_rows_beyond_the_tokenizer_are_never_drawn(network):
    answers = generate(
        network, PROMPTS, sampling=Sampling(max_new_tokens=30, temperature=5.0, top_k=0, top_p=1.0), vocabulary=20
    )
    assert max(max(answer) for answer in answers if answer) < 20


def test_one_seed_gives_one_text(network):
    drawn = [
        generate(network, PROMPTS, sampling=Sampling(), generator=torch.Generator().manual_seed(4)) for _ in range(2)
    ]
    other = generate(network, PROMPTS, sampling=Sampling(), generator=torch.Generator().manual_seed(5))
    assert drawn[0] == drawn[1] != other


def test_top_k_of_one_is_greedy(network):
    assert generate(network, PROMPTS, sampling=Sampling(max_new_tokens=20, top_k=1)) == generate(
        network, PROMPTS, sampling=GREEDY
    )


def test_the_network_is_handed_back_in_the_mode_it_came_in(network):
    network.train()
    generate(network, PROMPTS, sampling=GREEDY)
    assert network.training


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-8, 8), min_size=2, max_size=30, unique=True), st.integers(1, 40), st.floats(0.05, 1.0))
def test_what_stays_is_the_fewest_likeliest_tokens_that_reach_top_p_within_top_k(values, top_k, top_p):
    logits = torch.tensor([values], dtype=torch.float64)
    kept = filter_logits(logits, top_k=top_k, top_p=top_p)[0].isfinite()
    order = logits[0].argsort(descending=True)[:top_k]
    probabilities = logits[0][order].softmax(-1)
    count = int(kept.sum())

    assert 1 <= count <= min(top_k, len(values))
    assert set(kept.nonzero().flatten().tolist()) == set(order[:count].tolist())
    assert probabilities[:count].sum() >= min(top_p, 1.0) - 1e-9
    assert count == 1 or top_p == 1 or probabilities[: count - 1].sum() < top_p + 1e-9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "0 \\(greedy\\) or more"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "above 0, at most 1"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**change)


def test_a_prompt_that_fills_the_positions_is_refused(network):
    with pytest.raises(ValueError, match="a prompt has 96 tokens; with 96 positions at most 95"):
        generate(network, [[1] * 96], sampling=GREEDY)
    assert len(generate(network, [[1] * 95], sampling=GREEDY)[0]) <= 1


def test_an_empty_prompt_is_refused(network):
    with pytest.raises(ValueError, match="a prompt is empty"):
        generate(network, [[1], []], sampling=GREEDY)
    assert generate(network, [], sampling=GREEDY) == []
