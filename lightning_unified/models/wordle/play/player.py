"""A trained language model as a player, from a checkpoint or a module in training."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lightning_unified.models.causal_lm.checkpoint import load_trained
from lightning_unified.models.grpo.rollout import Sampler, SamplingOptions
from lightning_unified.models.wordle.data.wordle_rows import pad_prompts
from lightning_unified.models.wordle.game.state import State
from lightning_unified.models.wordle.game.words import WordList, read_words, split_secrets
from lightning_unified.models.wordle.module import Wordle
from lightning_unified.models.wordle.prompts import STOP, messages

__all__ = ["ModelPlayer", "load"]


class ModelPlayer:
    """Player that samples a model's answers, with the template of its training.

    See `games.TrainedPlayer`. The sampler's cache stays on the device between turns, until `release`. The player has its own random
    generator, so that the same model plays the same games and other random numbers do not change.

    Args:
        checkpoint: The `.ckpt` file, or the module itself.
        device: "cpu", "cuda", "mps" or "auto": the available accelerator, else the CPU. No effect for a module.
        temperature: 0 takes the likeliest token; an answer without a word of the list then repeats in all remaining tries.
        rows: States in a batch, whose keys and values are in memory together.

    Raises:
        FileNotFoundError: If there is no such file, or weights that it leaves out are not found.
        RuntimeError: If it is damaged, belongs to another model, or was saved before the first training step.
    """

    def __init__(
        self, checkpoint: str | Path | Wordle, *, device: str = "auto", temperature: float = 0.0, rows: int = 64
    ) -> None:
        self.module = checkpoint if isinstance(checkpoint, Wordle) else load(checkpoint, device=device)
        chat = self.module.chat
        self._rows, self._most = rows, 0
        self._generator: torch.Generator | None = None
        self._length = self.module.identity.game.get("prompt_length", 0)
        self._sampler = Sampler(
            self.module.policy,
            stop_ids=[chat.end_id],
            stop_text=STOP,
            decode=chat.decode,
            kept_bytes=sys.maxsize,
        )
        self._sampling = SamplingOptions(temperature=temperature, max_new_tokens=self.module.sampling.max_new_tokens)

    @property
    def temperature(self) -> float:
        """Temperature of the next answers."""
        return self._sampling.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._sampling = replace(self._sampling, temperature=value)

    @cached_property
    def words(self) -> WordList:
        """The list of words in training, read from its source."""
        return read_words(self._game("words"))

    @cached_property
    def held_out(self) -> tuple[str, ...]:
        """The answers that were never the secret of a training game."""
        fraction, seed = self._game("held_out_fraction"), self._game("seed")
        return split_secrets(self.words, held_out_fraction=fraction, seed=seed)[1]

    def _game(self, name: str) -> Any:
        if name not in self.module.identity.game:
            raise RuntimeError("this model was not trained with WordleData, so nobody knows its words.")
        return self.module.identity.game[name]

    def release(self) -> None:
        """Free the sampler's cache."""
        self._sampler.release()

    def answers(self, states: Sequence[State]) -> list[str]:
        """Return one completion for each state."""
        found: list[str] = []
        for start in range(0, len(states), self._rows):
            found += self._answered(states[start : start + self._rows])
        return found

    @torch.no_grad()
    def _answered(self, states: Sequence[State]) -> list[str]:
        chat = self.module.chat
        prompts = [chat.prompt(messages(state)) for state in states]
        device = next(self.module.policy.parameters()).device
        if device.type == "cuda":  # steps are recorded for a number of rows; filling up costs less than a new recording
            self._most = max(self._most, len(prompts))
            prompts += [prompts[-1]] * (self._most - len(prompts))
        # one length for all calls, so that recordings can be reused
        prompt, mask = pad_prompts(prompts, chat.pad_id, length=max(self._length, *map(len, prompts)))
        if self._generator is None:
            self._generator = torch.Generator(device).manual_seed(0)
        sampled = self._sampler(prompt.to(device), mask.to(device), self._sampling, generator=self._generator)
        lengths = sampled.mask.sum(1).tolist()
        texts = [chat.decode(ids[:count]) for ids, count in zip(sampled.ids.tolist(), lengths, strict=True)]
        return texts[: len(states)]


def load(path: str | Path, *, device: str = "auto") -> Wordle:
    """Load the model in a checkpoint, in eval mode, with its tokenizer.

    Raises:
        FileNotFoundError: As `ModelPlayer`, like the other.
        RuntimeError: See there; or if weights and sizes do not fit together.
    """
    return load_trained(Wordle, path, model="wordle", untrained="it would guess at random", device=device)
