"""Turn prompts into a prepared batch: reward completions, keep groups whose rewards differ.

Sources of the advantages: Shao et al. 2024, "DeepSeekMath", section 4.1 (groups, division by their standard deviation). Liu et
al. 2025, "Understanding R1-Zero-Like Training", section 3 (centred only: the division gives most weight to prompts whose answers
are nearly all right or nearly all wrong).
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_unified.models.grpo.batches.sequences import completed
from lightning_unified.models.grpo.rollout import Completions
from lightning_unified.models.grpo.task import Task

__all__ = ["group_advantages", "informative_groups", "prepared", "rewards_of"]

_EPSILON = 1e-4  # keeps the quotient finite, as in common implementations
_SAME = 1e-6  # judgement: smaller differences within a group are rounding


def group_advantages(rewards: Tensor, *, group_size: int, scale: Literal["none", "group"] = "none") -> Tensor:
    """Return the advantages (P * G): rewards (P * G) minus their group's mean.

    With `scale` "group", they are divided by the group's sample standard deviation plus 1e-4.
    """
    groups = rewards.unflatten(0, (-1, group_size))
    centred = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        centred = centred / (groups.std(1, keepdim=True) + _EPSILON)
    return centred.flatten()


def informative_groups(rewards: Tensor, *, group_size: int) -> Tensor:
    """Return (P) bool: the groups whose rewards (P * G) differ; others have zero advantages."""
    groups = rewards.unflatten(0, (-1, group_size))
    return groups.amax(1) - groups.amin(1) > _SAME


def rewards_of(
    task: Task, examples: Tensor, sampled: Completions, *, decode: Callable[[list[int]], str], step: int
) -> dict[str, Tensor]:
    """Return the rewards (N) by name, on the device of `examples` (N); see `Task.rewards`.

    Raises:
        ValueError: If "total" is missing, or a reward is not one finite number for each completion.
    """
    lengths = sampled.mask.sum(1).tolist()
    texts = [decode(row[:length]) for row, length in zip(sampled.ids.tolist(), lengths, strict=True)]
    rewards = task.rewards(examples, texts, step=step)
    wrong = [f"{name} {tuple(value.shape)}" for name, value in rewards.items() if value.shape != examples.shape]
    if "total" not in rewards or wrong:
        raise ValueError(
            f"{type(task).__name__}.rewards gave {', '.join(wrong or rewards) or 'nothing'}; it must give one number for each of the "
            f'{len(examples)} completions under each name, and "total" among them.'
        )
    if endless := [name for name, value in rewards.items() if not bool(value.isfinite().all())]:
        raise ValueError(
            f"{type(task).__name__}.rewards gave {endless[0]} values that are infinite or no numbers; let it pay 0."
        )
    return {name: value.to(examples.device) for name, value in rewards.items()}


def prepared(
    batch: Mapping[str, Tensor],
    sampled: Completions,
    rewards: Mapping[str, Tensor],
    *,
    group_size: int,
    scale: Literal["none", "group"],
    width: int | None,
) -> dict[str, Any]:
    """Return the completions as a prepared batch.

    `advantages`, `sampled_log_probs` and `figures` are added. Groups with equal rewards have no gradient and are left out, as are
    columns that no other group needs. If no group is left, the first stays without active tokens. See `sequences` for the other
    fields.

    Args:
        batch: A batch with `prompt` and `prompt_mask` (P, L).
        sampled: Its completions.
        rewards: Their rewards (N), by name.
        group_size: Completions of each prompt, G.
        scale: See `group_advantages`.
        width: Upper bound on the tokens of a completion: all rows are then kept, inactive groups last, so that memory can be
            planned by the largest batch. None for as few rows and columns as possible.
    """
    total, groups = rewards["total"], informative_groups(rewards["total"], group_size=group_size)
    order = (~groups).int().sort(stable=True).indices
    kept = len(groups) if width is not None else max(int(groups.sum()), 1)
    rows = (order[:kept, None] * group_size + torch.arange(group_size, device=order.device)).flatten()
    counts = sampled.mask & groups.repeat_interleave(group_size)[:, None]
    longest = int(sampled.mask[rows].sum(1).amax()) if width is None else width
    ids, mask, log_probs = (_columns(one[rows], longest) for one in (sampled.ids, counts, sampled.log_probs.detach()))
    of_prompt = rows // group_size
    found = completed(batch["prompt"][of_prompt], batch["prompt_mask"][of_prompt].bool(), ids=ids, mask=mask)
    if width is None:
        found["tokens"] = found["tokens"][:, : int((found["start"] + mask.sum(1)).amax())]
    advantages = group_advantages(total, group_size=group_size, scale=scale)[rows]
    return {
        **found,
        "advantages": advantages,
        "sampled_log_probs": log_probs,
        "total": int(mask.sum()),
        "figures": _figures(sampled, rewards, informative=groups),
    }


def _columns(values: Tensor, width: int) -> Tensor:
    """Return the first `width` columns of (R, T), filled up with zeros."""
    return torch.nn.functional.pad(values[:, :width], (0, max(width - values.shape[1], 0)))


def _figures(sampled: Completions, rewards: Mapping[str, Tensor], *, informative: Tensor) -> dict[str, float]:
    """Return the logged figures of all completions, dropped ones included."""
    lengths = sampled.mask.sum(1).float()
    figures = {f"reward_{name}": value.float().mean() for name, value in rewards.items() if name != "total"}
    figures |= {
        "reward": rewards["total"].float().mean(),
        "spread": rewards["total"].float().std(),
        "length": lengths.mean(),
        "longest": lengths.amax(),
        "ended": sampled.ended.float().mean(),
        "dropped_groups": 1 - informative.float().mean(),
    }
    return dict(zip(figures, torch.stack(list(figures.values())).tolist(), strict=True))
