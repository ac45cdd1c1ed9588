"""Answers over a cache are those of whole reads, whatever the cache holds."""

import pytest
import torch

from lightning_unified.models.causal_lm.sampling import Sampling
from lightning_unified.models.finetune.use import answering
from tests.support.grpo.families import FAMILIES, family

GREEDY = Sampling(temperature=0, max_new_tokens=4)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_over_several_turns_are_those_of_whole_reads(name, monkeypatch):
    drawn, draw = [], answering.draw
    monkeypatch.setattr(answering, "draw", lambda logits, **given: drawn.append(logits) or draw(logits, **given))
    model, turns, places = family(name).eval(), [], []
    answerer = answering.Answerer(model, stop=[])
    for turn in ([5, 7, 11, 13, 17], [19, 23, 29], [31]):
        turns += turn
        answer = list(answerer(turns, GREEDY))
        places += range(len(turns) - 1, len(turns) - 1 + len(answer))
        turns += answer
    ids, positions = torch.tensor([turns]), torch.arange(len(turns))[None]
    with torch.no_grad():
        whole = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, places]

    assert len(places) == 12
    torch.testing.assert_close(torch.cat(drawn), whole, rtol=1e-4, atol=1e-4)
