"""Decisions of callbacks that all processes take together."""

import torch
from lightning import Trainer

from lightning_unified.step.ranks.consensus import Point, Ranks

__all__ = ["first_text", "most"]


def most(trainer: Trainer, value: int) -> int:
    """Return the largest `value` of all processes, 0 or more; all call it together.

    The ranks of a unified strategy meet over sockets, which does not wait for the device. Other strategies reduce a tensor.
    """
    if trainer.world_size == 1:
        return value
    ranks = getattr(trainer.strategy, "ranks", None)
    if isinstance(ranks, Ranks):
        return ranks.most(value)
    return int(trainer.strategy.reduce(torch.tensor(value, device=trainer.strategy.root_device), reduce_op="max"))


def first_text(trainer: Trainer, text: str) -> str:
    """Return the text of the first process that has one, with its number; `""` if none has.

    All processes call it together.
    """
    if trainer.world_size == 1:
        return text
    ranks = getattr(trainer.strategy, "ranks", None)
    if isinstance(ranks, Ranks):
        texts = ranks.exchange(Point.DECISION, text)
    else:
        texts = [trainer.strategy.broadcast(text, src=rank) for rank in range(trainer.world_size)]
    return next((f"{said}, on rank {rank}" for rank, said in enumerate(texts) if said), "")
