"""Sample texts of a trained GearHead, which a run prints at its end."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_unified.models.gearhead.module import GearHead

__all__ = ["sample_texts"]

_OPENINGS = ("", "The ", "If a class ", "The value of ")
_FAULTS = (
    ("Caterpillar 320 excavator", "loses power under load", ("P0087",)),
    ("John Deere 6R tractor", "rough idle, misfire under load", ("P0301",)),
    ("Volvo FH truck", "warning lamp, engine derates", ("SPN 157 FMI 18",)),
)
_NEW_TOKENS = 60


def sample_texts(module: "GearHead", *, seed: int) -> list[str]:
    """Return texts that `module` generates; equal weights and `seed` give equal texts. Empty without a tokenizer."""
    from lightning_unified.models.gearhead.generate import Sampling
    from lightning_unified.models.gearhead.inference import Diagnoser
    from lightning_unified.models.gearhead.layout import Record, prompt

    if module.tokenizer is None:
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
    return [(asked + answer).removeprefix("<s>").strip() for asked, answer in zip(prompts, answers, strict=True)]
