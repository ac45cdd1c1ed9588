"""A few texts out of the model that was just trained, for the eye."""

import re
from collections.abc import Iterable

from lightning import LightningModule

__all__ = ["printable", "sample_texts", "shown_by"]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model of bytes may write what a terminal would obey

_OPENINGS = ("", "The ", "If a class ", "The value of ")
_FAULTS = (
    ("Caterpillar 320 excavator", "loses power under load", ("P0087",)),
    ("John Deere 6R tractor", "rough idle, misfire under load", ("P0301",)),
    ("Volvo FH truck", "warning lamp, engine derates", ("SPN 157 FMI 18",)),
)
_NEW_TOKENS = 60


def sample_texts(module: LightningModule, *, seed: int) -> list[str]:
    """Return texts that `module` writes, the same for the same weights and `seed`; none for a module that writes nothing."""
    from lightning_unified.data.documents.record import Record, prompt
    from lightning_unified.models.gearhead.generate import Sampling
    from lightning_unified.models.gearhead.inference import Diagnoser
    from lightning_unified.models.gearhead.module import GearHead

    if not isinstance(module, GearHead) or module.tokenizer is None:
        return []
    writer = Diagnoser(module.network, tokenizer=module.tokenizer)
    if module.config.is_text_model:
        prompts = [f"<s>{opening}" for opening in _OPENINGS]
    else:
        prompts = [
            prompt(Record(equipment=equipment, symptom=symptom, error_codes=codes))
            for equipment, symptom, codes in _FAULTS
        ]
    sampling = Sampling(max_new_tokens=_NEW_TOKENS, temperature=0.7, top_k=50, top_p=0.9)
    answers = writer.generate(prompts, sampling=sampling, seed=seed)
    texts = [(asked + answer).removeprefix("<s>").strip() for asked, answer in zip(prompts, answers, strict=True)]
    return [printable(text) for text in texts]


def shown_by(callbacks: Iterable[object]) -> list[str]:
    """Return the texts that callbacks have to show of the model: what they hold as `shown`."""
    return [printable(text) for callback in callbacks for text in getattr(callback, "shown", ())]


def printable(text: str) -> str:
    """Return `text` with everything replaced that a terminal would act on instead of showing it."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
