"""Explain a label by integrated gradients for each word.

The sum of the gradients and a deletion test check the explanation. Sources: Sundararajan, Taly and Yan 2017, "Axiomatic Attribution
for Deep Networks"; Petsiuk, Das and Saenko 2018, "RISE", section 4.3 (deletion).
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from tokenizers import Encoding
from torch import Tensor

from lightning_unified.models.choices import check_choice
from lightning_unified.models.classifier.data.tokens.text_encoder import Encoded
from lightning_unified.models.classifier.explanation.deletion import Deletion, delete_in_order
from lightning_unified.models.classifier.inference.classify import encoder_of, text_length_of
from lightning_unified.models.classifier.module import TextClassifier

__all__ = ["Explanation", "Word", "explain"]

_TOLERANCE = 0.05  # allowed error of the attributions' sum, as a share of the explained difference
_MOST_STEPS = 512
_ROWS = 32  # points of the integral in a batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """A word of a text.

    Attributes:
        text: The word.
        start: Position of its first character in the text.
        end: Position after its last.
        attribution: Its contribution to the label's logit over a masked word; below 0, it speaks against the label.
    """

    text: str
    start: int
    end: int
    attribution: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Explanation of a label for a text.

    Attributes:
        text: The whole text, truncated part included.
        label: The explained label.
        probability: The label's probability, scaled by the temperature.
        baseline_probability: The same with every word masked.
        words: The words that were read, in order.
        difference: The label's logit minus that of the baseline; attributions should add up to it.
        delta: Error of the attributions' sum.
        steps: Points of the integral.
        converged: Whether `delta` is at most 5 % of `difference`; otherwise the attributions are unreliable.
        deletion: How fast the probability falls when words are masked in the order of their attributions, and in random orders;
            None without orders to compare with.
    """

    text: str
    label: str
    probability: float
    baseline_probability: float
    words: list[Word]
    difference: float
    delta: float
    steps: int
    converged: bool
    deletion: Deletion | None


def explain(
    module: TextClassifier, text: str, *, label: str | None = None, steps: int = 32, orders: int = 100, seed: int = 0
) -> Explanation:
    """Return the contribution of each word of `text` to a label's logit.

    The path of the integral begins at the same text with every word masked. Special tokens stay, and every token keeps its position. A
    baseline of pads would shift the positions of some encoders and lose the tokens that the head reads. The number of points doubles
    until the attributions add up, or reaches 512.

    Args:
        module: A trained classifier.
        text: The text.
        label: A label's name; None for the most likely.
        steps: Points of the integral to begin with.
        orders: Random orders of deletion to compare with; 0 for no deletion.
        seed: Seed of the random orders.

    Raises:
        RuntimeError: If captum is not installed, or the classifier has no tokenizer.
        ValueError: If there is no such label, the text has no words, or a number is out of range.
    """
    if find_spec("captum") is None:
        raise RuntimeError(
            "explaining needs captum, which is not installed; run: pip install 'lightning-unified[classifier]'"
        )
    if steps < 2 or orders < 0:
        raise ValueError(f"steps={steps}, orders={orders}: give 2 steps or more, and no negative number of orders.")
    if label is not None:
        check_choice("label", label, module.label_names)
    encoder = encoder_of(module)
    text = encoder.prepared(text)
    encoding = encoder.encode([text], max_length=text_length_of(module))[0]
    groups = _words(encoding)
    if not groups:
        raise ValueError(f"there is no word in the text {text[:40]!r}, and so nothing to explain.")
    masked = next((i for kind in ("mask_token", "unk_token", "pad_token") if (i := encoder.id_of(kind)) is not None), 0)
    was_training = module.training
    module.eval()
    try:
        return _explained(
            module, text, encoding, groups, label=label, masked=masked, steps=steps, orders=orders, seed=seed
        )
    finally:
        module.train(was_training)
        module.zero_grad()


def _explained(
    module: TextClassifier,
    text: str,
    encoding: Encoding | Encoded,
    groups: list[list[int]],
    *,
    label: str | None,
    masked: int,
    steps: int,
    orders: int,
    seed: int,
) -> Explanation:
    ids = torch.tensor([encoding.ids], device=module.device)
    baseline = ids.clone()
    baseline[0, [place for group in groups for place in group]] = masked
    with torch.no_grad():
        logits = module(torch.cat([ids, baseline]))
        shares = module.probabilities(logits)
    target = int(logits[0].argmax()) if label is None else module.label_names.index(label)
    difference = float(logits[0, target] - logits[1, target])
    attributions, delta, taken = _integrated(module, ids, baseline, target=target, steps=steps, difference=difference)
    words = [_word(text, encoding, group, attributions) for group in groups]
    deletion = None
    if orders:
        order = sorted(range(len(words)), key=lambda index: -words[index].attribution)
        deletion = delete_in_order(
            module, ids[0], groups, order=order, target=target, masked=masked, orders=orders, seed=seed
        )
    return Explanation(
        text=text,
        label=module.label_names[target],
        probability=float(shares[0, target]),
        baseline_probability=float(shares[1, target]),
        words=words,
        difference=difference,
        delta=delta,
        steps=taken,
        converged=abs(delta) <= _TOLERANCE * abs(difference),
        deletion=deletion,
    )


def _integrated(
    module: TextClassifier, ids: Tensor, baseline: Tensor, *, target: int, steps: int, difference: float
) -> tuple[Tensor, float, int]:
    """Return attributions (T), the error of their sum, and the number of points."""
    from captum.attr import IntegratedGradients

    table: Any = module.network.model.get_input_embeddings()
    with torch.no_grad():
        start, end = table(baseline), table(ids)
    method = IntegratedGradients(lambda embeddings: module.network(None, None, embeddings))
    while True:
        found: Any = method.attribute(
            end, baselines=start, target=target, n_steps=steps, method="gausslegendre", internal_batch_size=_ROWS
        )
        attributions = found.detach().sum(-1)[0]
        delta = float(attributions.sum()) - difference
        if abs(delta) <= _TOLERANCE * abs(difference) or steps * 2 > _MOST_STEPS:
            return attributions, delta, steps
        steps *= 2


def _words(encoding: Encoding | Encoded) -> list[list[int]]:
    """Return the places of each word's tokens; special tokens are in no word."""
    groups: dict[int, list[int]] = {}
    for place, (word, special) in enumerate(zip(encoding.word_ids, encoding.special_tokens_mask, strict=True)):
        if not special:
            groups.setdefault(-1 - place if word is None else word, []).append(place)
    return list(groups.values())


def _word(text: str, encoding: Encoding | Encoded, group: list[int], attributions: Tensor) -> Word:
    start, end = encoding.offsets[group[0]][0], encoding.offsets[group[-1]][1]
    return Word(text=text[start:end], start=start, end=end, attribution=float(attributions[group].sum()))
