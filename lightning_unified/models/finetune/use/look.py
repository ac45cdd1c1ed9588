"""A first look at data before training: counts, lengths, and which text is scored."""

from itertools import groupby
from typing import Any

from lightning_unified.models.finetune.data.answers import AnswerMask
from lightning_unified.models.finetune.data.finetune_data import FinetuneData

__all__ = ["look"]

_WIDTH = 40  # of the longest bar


def look(**settings: Any) -> str:
    """Return counts, a histogram of lengths, and one example with its scored text in brackets.

    Longer examples are counted, not refused.

    Args:
        settings: Arguments of `FinetuneData`.
    """
    data = FinetuneData(**settings, too_long="drop", batch_size=1)
    lines = [data.describe_line(), "", "tokens of an example"]
    counts = data.describe()["examples_up_to_tokens"]
    for size, count in counts.items():
        bar = "█" * max(round(_WIDTH * count / max(counts.values())), 1)
        lines.append(f"up to {size:>7,}  {count:>7,}  {bar}")
    mask = AnswerMask(data.chat, loss_on=data.hparams["loss_on"], prompts=data.hparams["prompts"])
    first = data.held_out[0]
    encoded = mask(first)
    runs = groupby(zip(encoded.ids.tolist(), encoded.scored.tolist(), strict=True), key=lambda token: token[1])
    text = ""
    for is_scored, tokens in runs:
        part = data.chat.decode([token for token, _ in tokens], skip_special_tokens=False)
        text += f"⟦{part}⟧" if is_scored else part
    return "\n".join([*lines, "", f"{first.where}, the scored text in ⟦⟧:", text])
