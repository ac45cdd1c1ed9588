"""Check that a tokenizer belongs to a model."""

from collections.abc import Mapping

__all__ = ["check_vocabulary"]


def check_vocabulary(given: Mapping[str, int], *, rows: int, trained: Mapping[str, int] | None) -> None:
    """Raise a ValueError if a tokenizer has too many tokens for a model, or others than in training.

    Args:
        given: The tokenizer's tokens with their ids.
        rows: Rows of the model's token table.
        trained: The tokens of the model's training; None before training.
    """
    if len(given) > rows:
        raise ValueError(
            f"the tokenizer has {len(given):,} tokens, the model's vocabulary is {rows:,}; train the tokenizer with at most "
            f"{rows:,} or set the model's vocabulary={len(given)}."
        )
    if trained is not None and trained != given:
        raise ValueError(
            f"this model was trained with another tokenizer ({len(trained):,} tokens) than the one given ({len(given):,} tokens); "
            "its weights mean nothing under the new one. Use the tokenizer of the checkpoint."
        )
