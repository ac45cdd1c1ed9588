"""A text with its class: what a source of labelled texts gives."""

from dataclasses import dataclass

__all__ = ["LabelledText"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledText:
    """One text and its class.

    Attributes:
        text: As it was found: nothing lowered, stripped of names or links, or otherwise cleaned.
        label: The name of its class.
        group: Texts of one group (sentences of one review) are never parted by a split; empty for a group of its own.
        is_test: Whether an official split holds it out for the last judgement.
    """

    text: str
    label: str
    group: str = ""
    is_test: bool = False
