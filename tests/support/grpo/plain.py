"""A plain implementation of GRPO, for comparison only.

It runs sequence by sequence without padding, with all logits at once, in one loop.
"""

import torch

from tests.support.grpo.training import GROUP, TEMPERATURE, Task, decode


def rollouts(given, examples):
    """Return [(prompt ids, completion ids, advantage)] of one call of the sampler.

    Groups with equal rewards are left out.
    """
    prompt, prompt_mask, found = given
    rows = []
    for index in range(len(found.ids)):
        of = index // GROUP
        rows.append((prompt[of][prompt_mask[of]], found.ids[index][found.mask[index]]))
    totals = Task().rewards(examples.repeat_interleave(GROUP), [decode(ids.tolist()) for _, ids in rows])["total"]
    kept = []
    for start in range(0, len(rows), GROUP):
        group = totals[start : start + GROUP]
        if group.max() > group.min():
            kept += [(*rows[start + i], float(group[i] - group.mean())) for i in range(GROUP)]
    return kept


def log_probs(model, prompt, completion):
    """Return the log-probabilities of a completion's tokens."""
    ids = torch.cat([prompt, completion])
    scores = (model(input_ids=ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    return torch.stack([scores[len(prompt) - 1 + i, token] for i, token in enumerate(completion.tolist())])


def loss(model, rows, *, old, reference, low, high, beta):
    """Return the loss of all rows, and the share of tokens that are clipped."""
    terms, clipped = [], 0
    for index, (prompt, completion, advantage) in enumerate(rows):
        now = log_probs(model, prompt, completion)
        for t in range(len(completion)):
            ratio = torch.exp(now[t] - old[index][t])
            clipped += bool((advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low))
            gain = torch.min(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)
            distance = reference[index][t] - now[t]
            terms.append(-gain + beta * (torch.exp(distance) - distance - 1))
    return sum(terms) / len(terms), clipped / len(terms)


def train(model, anchor, sampled, examples, *, inner, learning_rate, low, high, beta):
    """Train `model` on each call's completions `inner` times.

    Return the gradients, the losses and the clipped shares, by step.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    gradients, losses, shares = [], [], []
    for given, of in zip(sampled, examples, strict=True):
        rows = rollouts(given, of)
        with torch.no_grad():
            old = [log_probs(model, prompt, completion) for prompt, completion, _ in rows]
            reference = [log_probs(anchor, prompt, completion) for prompt, completion, _ in rows]
        for _ in range(inner):
            optimizer.zero_grad()
            value, clipped = loss(model, rows, old=old, reference=reference, low=low, high=high, beta=beta)
            value.backward()
            gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
            losses.append(float(value.detach()))
            shares.append(clipped)
            optimizer.step()
    return gradients, losses, shares
