"""Callback that plays held-out secrets during training.

It logs win rate, turns and valid guesses.
"""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_unified.models.wordle.game.feedback import marks
from lightning_unified.models.wordle.module import Wordle
from lightning_unified.models.wordle.play.games import Game, GameReport, play_games
from lightning_unified.models.wordle.play.player import ModelPlayer

__all__ = ["PlayWordle", "shown"]

_SIGNS = "·?!"  # gray, yellow, green
_LOGGED = {"win_rate": "win_rate", "format": "format_share", "valid": "valid_share", "consistent": "consistent_share"}


class PlayWordle(Callback):
    """Play held-out secrets after each validation, and once between imitation and GRPO.

    It logs `val/win_rate`, `val/turns` (of won games), and the shares `val/format`, `val/valid` and `val/consistent` of all answers;
    at the end of imitation, the same under `sft/`. Each time it saves a record and some games in files named after the step.

    Args:
        games: Number of held-out secrets, always the same ones; None for all.
        batch_size: Games played together.
        temperature: See `ModelPlayer`.
        samples: Number of games to save as text.
        after_sft: Whether to play at the end of imitation too.
        directory: Folder of records; None takes `wordle/` in the run's folder.

    Attributes:
        shown: The last games saved as text.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        *,
        games: int | None = 100,
        batch_size: int = 64,
        temperature: float = 0.0,
        samples: int = 3,
        after_sft: bool = True,
        directory: str | None = None,
    ) -> None:
        asked = (
            ("games", games, 1),
            ("batch_size", batch_size, 1),
            ("temperature", temperature, 0),
            ("samples", samples, 0),
        )
        for name, value, least in asked:
            if value is not None and value < least:
                raise ValueError(f"{name}={value}; give {least} or more.")
        self.games, self.batch_size, self.samples = games, batch_size, samples
        self.temperature, self.after_sft, self.directory = temperature, after_sft, directory
        self.shown: list[str] = []
        self._imitates = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise for a module or data without games, before the first step.

        Raises:
            ValueError: If the module is no `Wordle`, or no data defines held-out secrets.
        """
        if not isinstance(pl_module, Wordle) or not hasattr(getattr(trainer, "datamodule", None), "held_out"):
            raise ValueError(
                f"PlayWordle needs a Wordle module with WordleData, and this is {type(pl_module).__name__}; leave it out, as "
                "callbacks=default does."
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        imitated, self._imitates = self._imitates, "labels" in batch
        if imitated and not self._imitates and self.after_sft:
            figures = self._play(trainer, pl_module, phase="sft")
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            for name, value in self._play(trainer, pl_module, phase="val").items():
                pl_module.log(name, value, prog_bar=name == "val/win_rate")

    def _play(self, trainer: Trainer, module: LightningModule, *, phase: str) -> dict[str, float]:
        """Play, write the record, and return the values to log."""
        assert isinstance(module, Wordle)
        data: Any = getattr(trainer, "datamodule")  # noqa: B009 - undeclared
        player = ModelPlayer(module, rows=self.batch_size, temperature=self.temperature)
        module.give_back()  # no plan includes two caches at once
        # the sampler's cache must not depend on the order of its callers
        with torch.inference_mode(mode=False), torch.no_grad(), trainer.precision_plugin.val_step_context():
            report = play_games(player, data.held_out[: self.games], data.words)
        player.release()
        self.shown = [shown(game) for game in report.played[: self.samples]]
        if trainer.is_global_zero:
            self._write(report, trainer, phase=phase)
        figures = {f"{phase}/{name}": float(getattr(report, field)) for name, field in _LOGGED.items()}
        return figures | ({} if report.mean_turns is None else {f"{phase}/turns": report.mean_turns})

    def _write(self, report: GameReport, trainer: Trainer, *, phase: str) -> None:
        folder = Path(self.directory or Path(trainer.log_dir or trainer.default_root_dir, "wordle"))
        folder.mkdir(parents=True, exist_ok=True)
        record = {"phase": phase, "global_step": trainer.global_step, **report.to_dict()}
        name = f"{phase}-step={trainer.global_step}"
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if self.shown:
            (folder / f"{name}.txt").write_text("\n\n".join(self.shown) + "\n", encoding="utf-8")


def shown(game: Game) -> str:
    """Return a game as text: answers, valid guesses with marks, and the result.

    `!` marks a letter in place, `?` a letter elsewhere.
    """
    lines = [f"secret: {game.secret}"]
    lines += [f"  {' '.join(text.split())}" for text in game.answers]
    lines += [f"  {turn.guess}  {''.join(_SIGNS[mark] for mark in marks(turn.code))}" for turn in game.state.turns]
    return "\n".join([*lines, "  won" if game.state.solved else "  lost"])
