"""What a completion is worth beside the others of its prompt.

Source: Shao et al. 2024, "DeepSeekMath", section 4.1 (groups, division by their standard deviation); Liu et al. 2025,
"Understanding R1-Zero-Like Training", section 3 (centred only: the division gives prompts that are nearly all right or wrong the most weight).
"""

from typing import Literal

from torch import Tensor

__all__ = ["group_advantages", "groups_that_tell"]

_EPSILON = 1e-4  # keeps the quotient finite; as the common implementations have it
_SAME = 1e-6  # judgement: rewards of a group that differ by less are the same but for rounding


def group_advantages(rewards: Tensor, *, group_size: int, scale: Literal["none", "group"] = "none") -> Tensor:
    """Return each reward less its group's mean; with "group" divided by the group's standard deviation (of a sample, plus 1e-4).

    Args:
        rewards: (P * G), the G completions of a prompt side by side.
        group_size: G, 2 or more.
        scale: "none" or "group".

    Returns:
        (P * G).
    """
    groups = rewards.unflatten(0, (-1, group_size))
    centred = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        centred = centred / (groups.std(1, keepdim=True) + _EPSILON)
    return centred.flatten()


def groups_that_tell(rewards: Tensor, *, group_size: int) -> Tensor:
    """Return (P) bool: the groups whose rewards differ; the others' advantages are zero and so is what they teach.

    Args:
        rewards: (P * G), the G completions of a prompt side by side.
        group_size: G.
    """
    groups = rewards.unflatten(0, (-1, group_size))
    return groups.amax(1) - groups.amin(1) > _SAME
