"""Diagnose with a trained GearHead from one checkpoint file; write samples after training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from lightning_unified.data.documents import error_codes as codes
from lightning_unified.data.documents import record as layout
from lightning_unified.models.causal_lm.sampling import Sampling
from lightning_unified.models.choices import inference_device
from lightning_unified.models.gearhead.generate import generate
from lightning_unified.models.gearhead.network import GearHeadNetwork
from lightning_unified.models.gearhead.sizes import GearHeadConfig
from lightning_unified.models.plain_checkpoint import load_weights, read_plain

__all__ = ["Diagnoser", "write_samples"]

_PREFIX = "network."
_BEGIN = layout.SPECIAL_TOKENS[layout.BOS_ID]
_OPENINGS = ("", "The ", "If a class ", "The value of ")
_FAULTS = (
    ("Caterpillar 320 excavator", "loses power under load", ("P0087",)),
    ("John Deere 6R tractor", "rough idle, misfire under load", ("P0301",)),
    ("Volvo FH truck", "warning lamp, engine derates", ("SPN 157 FMI 18",)),
)
_SAMPLE_RULES = Sampling(max_new_tokens=60, temperature=0.7, top_k=50, top_p=0.9)


class Diagnoser:
    """A trained network with its tokenizer, for diagnoses and text.

    Args:
        network: The trained network; it is put into eval mode.
        tokenizer: The tokenizer of its training.
    """

    def __init__(self, network: GearHeadNetwork, *, tokenizer: Tokenizer) -> None:
        self.network, self.tokenizer = network.eval(), tokenizer

    @classmethod
    def from_checkpoint(cls, path: str | Path, *, device: str = "auto") -> "Diagnoser":
        """Load the model in a Lightning checkpoint of `GearHead`; no other file is needed.

        The file is read as plain data (`weights_only=True`), so it cannot run code.

        Args:
            path: The `.ckpt` file.
            device: "cpu", "cuda", "mps" or "auto": the available accelerator, else the CPU.

        Raises:
            FileNotFoundError: If there is no such file.
            RuntimeError: If it is damaged, is not a checkpoint, or holds no GearHead or no tokenizer.
        """
        saved = read_plain(path)
        if not isinstance(saved, dict) or "state_dict" not in saved or "gearhead" not in saved:
            raise RuntimeError(
                f"{path} is not a checkpoint of GearHead; it holds no sizes, tokenizer and weights of one."
            )
        if saved["gearhead"].get("tokenizer") is None:
            raise RuntimeError(
                f"{path} holds no tokenizer; train with a data module that has one, and it travels along."
            )
        config = GearHeadConfig.from_mapping(saved["gearhead"]["config"])
        with torch.device("meta"):
            network = GearHeadNetwork(config)
        weights = {
            key.removeprefix(_PREFIX): value for key, value in saved["state_dict"].items() if key.startswith(_PREFIX)
        }
        load_weights(network, weights, path=path, assign=True)
        return cls(network.to(inference_device(device)), tokenizer=Tokenizer.from_str(saved["gearhead"]["tokenizer"]))

    def diagnose(
        self,
        equipment: str,
        symptom: str,
        error_codes: Sequence[str] = (),
        *,
        sampling: Sampling | None = None,
        seed: int | None = None,
    ) -> dict[str, Any]:
        """Return one diagnosis; see `batch_diagnose`."""
        record = {"equipment": equipment, "symptom": symptom, "error_codes": list(error_codes)}
        return self.batch_diagnose([record], sampling=sampling, seed=seed)[0]

    def batch_diagnose(
        self, records: Sequence[Mapping[str, Any]], *, sampling: Sampling | None = None, seed: int | None = None
    ) -> list[dict[str, Any]]:
        """Return a diagnosis of each record, all run as one batch.

        Args:
            records: JSON objects with `equipment`, `symptom` and, if there are any, `error_codes`.
            sampling: Sampling rules; by default `Sampling()`.
            seed: Makes the draws repeatable.

        Returns:
            Dicts with `equipment`, `symptom`, `error_codes`, `probable_cause`, `solution`, `full_response` (the text as the
            model wrote it), `subsystem` and `subsystem_probability` (both None without a diagnostic head).

        Raises:
            ValueError: If a record is incomplete, a prompt is too long, or the model was trained on plain text.
        """
        if self.network.config.is_text_model:
            raise ValueError("this model was trained on plain text and knows no records; give it a prompt to continue.")
        parsed = [layout.Record.from_mapping(record) for record in records]
        prompts = [layout.prompt(record) for record in parsed]
        results = []
        for record, prompt, answer in zip(parsed, prompts, self._answers(prompts, sampling, seed), strict=True):
            fields = layout.parse(prompt + answer)
            results.append(
                {
                    "equipment": record.equipment,
                    "symptom": record.symptom,
                    "error_codes": list(record.error_codes),
                    "probable_cause": fields["probable_cause"],
                    "solution": fields["solution"],
                    "full_response": answer.strip(),
                    **self._subsystem(prompt),
                }
            )
        return results

    def generate(
        self, prompts: Sequence[str], *, sampling: Sampling | None = None, seed: int | None = None
    ) -> list[str]:
        """Return the model's continuation of each text, tags included, up to `</s>`.

        Each text is the beginning of a document; a missing `<s>` is added. An empty text lets the model start a document.

        Raises:
            ValueError: If a prompt is too long.
        """
        texts = [prompt if prompt.startswith(_BEGIN) else _BEGIN + prompt for prompt in prompts]
        return self._answers(texts, sampling, seed)

    def _encode(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a text, and the row of the error table at each token."""
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        return encoded.ids, codes.align(text, encoded.offsets)

    def _answers(self, texts: Sequence[str], sampling: Sampling | None, seed: int | None) -> list[str]:
        generator, encoded = None, [self._encode(text) for text in texts]
        if seed is not None:
            generator = torch.Generator(device=self.network.token_embedding.weight.device).manual_seed(seed)
        drawn = generate(
            self.network,
            [tokens for tokens, _ in encoded],
            sampling=sampling or Sampling(),
            error_code_ids=[rows for _, rows in encoded],
            vocabulary=self.tokenizer.get_vocab_size(),
            generator=generator,
        )
        return [self.tokenizer.decode(ids, skip_special_tokens=False) for ids in drawn]

    @torch.no_grad()
    def _subsystem(self, prompt: str) -> dict[str, Any]:
        """Return the likeliest subsystem at `<error>`, before any code is read.

        The head was trained there.
        """
        tokens, rows = self._encode(prompt)
        error = self.tokenizer.token_to_id("<error>")
        if self.network.diagnostic_head is None or error not in tokens:
            return {"subsystem": None, "subsystem_probability": None}
        end = tokens.index(error) + 1
        device = self.network.token_embedding.weight.device
        ids, code_ids = torch.tensor([tokens[:end]], device=device), torch.tensor([rows[:end]], device=device)
        probabilities = self.network.diagnose(self.network(ids, code_ids)[0, -1]).softmax(-1)
        best = int(probabilities.argmax())
        return {"subsystem": codes.subsystem_name(best), "subsystem_probability": float(probabilities[best])}


def write_samples(network: GearHeadNetwork, *, tokenizer: Tokenizer, seed: int) -> list[str]:
    """Return each prompt with the network's continuation; the network is put into eval mode."""
    writer = Diagnoser(network, tokenizer=tokenizer)
    if network.config.is_text_model:
        prompts = [f"<s>{opening}" for opening in _OPENINGS]
    else:
        prompts = [
            layout.prompt(layout.Record(equipment=equipment, symptom=symptom, error_codes=error_codes))
            for equipment, symptom, error_codes in _FAULTS
        ]
    answers = writer.generate(prompts, sampling=_SAMPLE_RULES, seed=seed)
    return [(asked + answer).removeprefix("<s>").strip() for asked, answer in zip(prompts, answers, strict=True)]
