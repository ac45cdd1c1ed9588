"""Sample texts of GearHead: openings of plain text, or diagnoses of three faults."""

from tokenizers import Tokenizer

from lightning_unified.data.documents.record import Record, prompt
from lightning_unified.models.gearhead.diagnoser import Diagnoser
from lightning_unified.models.gearhead.generate import Sampling
from lightning_unified.models.gearhead.network import GearHeadNetwork

__all__ = ["write_samples"]

_OPENINGS = ("", "The ", "If a class ", "The value of ")
_FAULTS = (
    ("Caterpillar 320 excavator", "loses power under load", ("P0087",)),
    ("John Deere 6R tractor", "rough idle, misfire under load", ("P0301",)),
    ("Volvo FH truck", "warning lamp, engine derates", ("SPN 157 FMI 18",)),
)
_SAMPLING = Sampling(max_new_tokens=60, temperature=0.7, top_k=50, top_p=0.9)


def write_samples(network: GearHeadNetwork, *, tokenizer: Tokenizer, seed: int) -> list[str]:
    """Return each prompt with the network's continuation; the network is put into eval mode."""
    writer = Diagnoser(network, tokenizer=tokenizer)
    if network.config.is_text_model:
        prompts = [f"<s>{opening}" for opening in _OPENINGS]
    else:
        prompts = [
            prompt(Record(equipment=equipment, symptom=symptom, error_codes=codes))
            for equipment, symptom, codes in _FAULTS
        ]
    answers = writer.generate(prompts, sampling=_SAMPLING, seed=seed)
    return [(asked + answer).removeprefix("<s>").strip() for asked, answer in zip(prompts, answers, strict=True)]
