"""Run `experiment=wordle` whole, and measure what reinforcement learning added.

The model after imitation is compared with the model at the end.

Trains as a user would, `python train.py experiment=wordle …`, with a checkpoint where imitation ends. Then both checkpoints play the same held-out
secrets, several games of each as answers are drawn, once as they are trained (temperature 1) and once taking the likeliest
tokens, beside an entropy-greedy solver and a player that guesses any word that is still possible. A model's share is the mean over secrets of
the share of their games that were won; its 95 % interval is of a bootstrap over secrets, and so is that of the difference, in which each secret is
compared with itself.

Usage: python -m benchmarks.models.wordle.run [--directory runs/wordle-run] [hardware=cuda model.learning_rate=2e-5 …]
       (writes benchmarks/models/wordle/run.json, or --output; about ten minutes on an H200)
       python -m benchmarks.models.wordle.run --smoke   (tiny random weights on the CPU, which proves only that it runs)
"""

import argparse
import csv
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from benchmarks.records import origin, write
from lightning_unified.models.wordle.game.candidates import Patterns
from lightning_unified.models.wordle.game.words import WordList
from lightning_unified.models.wordle.play.games import Player, play_games
from lightning_unified.models.wordle.play.player import ModelPlayer
from lightning_unified.models.wordle.play.solvers import EntropyGreedy, RandomConsistent

ROOT = Path(__file__).parents[3]
RESULTS = Path(__file__).with_suffix(".json")
SMOKE = [
    "model=wordle-tiny",
    "data=wordle-tiny",
    "data.words=builtin",
    "data.sft_steps=6",
    "data.grpo_steps=4",
    "data.batch_size=2",
    "data.sft_batch_size=8",
    "trainer.max_steps=10",
    "trainer.val_check_interval=5",
    "hardware=cpu",
    "data.prompt_length=360",
    "data.text_length=424",
    "data.num_workers=0",
]
RESAMPLES = 10_000
FIGURES = ("format_share", "valid_share", "consistent_share", "mean_turns")


def main() -> None:
    options, overrides = _options()
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            options.directory, options.output, options.repeats = Path(folder, "run"), Path(folder, "smoke.json"), 2
            overrides = SMOKE + overrides
        directory = options.directory.resolve()
        if not options.judge_only:
            _train(directory, overrides, limit=options.limit)
        _judge(directory, overrides, options=options)


def _options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "wordle-run", help="of the run")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=4, help="games of each secret where answers are drawn")
    parser.add_argument("--limit", type=float, help="seconds after which training is interrupted")
    parser.add_argument("--judge-only", action="store_true", help="of a run that is there")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, written nowhere")
    options, overrides = parser.parse_known_args()
    strange = [word for word in overrides if "=" not in word or word.startswith("-")]
    if strange:
        parser.error(f"{' '.join(strange)}: give overrides as key=value")
    return options, overrides


def _train(directory: Path, overrides: Sequence[str], *, limit: float | None) -> None:
    """Train, with a checkpoint where imitation ends.

    A run that `limit` interrupts saves a checkpoint too, and is judged at that point.
    """
    every = "callbacks.checkpoint.every_n_steps=${data.sft_steps}"
    run = subprocess.Popen(
        [sys.executable, "train.py", "experiment=wordle", every, *overrides, f"run_dir={directory}"], cwd=ROOT
    )
    try:
        run.wait(limit)
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGINT)
        run.wait()


def _judge(directory: Path, overrides: Sequence[str], *, options: argparse.Namespace) -> None:
    """Let both checkpoints play, and write the record."""
    checkpoints = directory / "checkpoints"
    sft_steps = OmegaConf.load(directory / "config.yaml").data.sft_steps
    phases = {
        "imitation": next(checkpoints.glob(f"step_*0{sft_steps}.ckpt")),
        "reinforcement": checkpoints / "last.ckpt",
    }
    won: dict[tuple[str, float], np.ndarray] = {}
    players: list[dict[str, Any]] = []
    model = None
    for phase, path in phases.items():
        model = ModelPlayer(path, rows=512)
        for temperature, repeats in ((1.0, options.repeats), (0.0, 1)):
            began, model.temperature = time.monotonic(), temperature
            with _autocast(model):
                shares, figures = _play(model, model.held_out, words=model.words, repeats=repeats)
            won[phase, temperature] = shares
            found = {"player": phase, "steps": model.module.trained_steps, "temperature": temperature, **figures}
            players.append(found | {"seconds": round(time.monotonic() - began, 1)})
            print(json.dumps(players[-1]), flush=True)
        model.release()
    assert model is not None
    patterns = Patterns(model.words)
    for name, solver in {
        "entropy-greedy": EntropyGreedy(patterns),
        "random consistent": RandomConsistent(patterns),
    }.items():
        players.append({"player": name, **_play(solver, model.held_out, words=model.words, repeats=1)[1]})
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    record = {
        **origin("python -m benchmarks.models.wordle.run " + " ".join(overrides)),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "secrets": len(model.held_out),
        "gained": {
            f"temperature {temperature:g}": _mean(won["reinforcement", temperature] - won["imitation", temperature])
            for temperature in (1.0, 0.0)
        },
        "players": players,
        "summary": {name: value for name, value in summary.items() if name not in {"checkpoint", "resume_command"}},
        "games_while_training": [
            json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(
                (directory / "wordle").glob("*.json"), key=lambda path: (int(path.stem.split("=")[1]), path.stem)
            )
        ],
        "runs": _curves(directory / "metrics.csv"),  # one logged step a line
    }
    write(record, options.output)
    print(json.dumps(record["gained"], indent=1))


def _autocast(model: ModelPlayer) -> torch.autocast:
    """As the run has it: bfloat16 on a GPU, nothing elsewhere."""
    device = next(model.module.parameters()).device.type
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


def _play(
    player: Player, secrets: Sequence[str], *, words: WordList, repeats: int
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the share of won games for each secret, and the results of all games."""
    reports = [play_games(player, secrets, words) for _ in range(repeats)]
    won = np.array([[game.state.solved for game in report.played] for report in reports], dtype=float).mean(0)
    figures = {name: _average([getattr(report, name) for report in reports]) for name in FIGURES}
    return won, {"repeats": repeats, "win_rate": _mean(won), **figures}


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if known else None


def _mean(values: np.ndarray) -> dict[str, Any]:
    """Return the mean over secrets, with a 95 % bootstrap interval over them."""
    drawn = np.random.default_rng(0).choice(values, size=(RESAMPLES, len(values)))
    low, high = np.quantile(drawn.mean(1), (0.025, 0.975))
    return {"mean": round(float(values.mean()), 4), "interval": [round(float(low), 4), round(float(high), 4)]}


def _curves(path: Path) -> list[dict[str, float]]:
    """Return what was logged of training, step by step."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    kept = [{name: value for name, value in row.items() if name.startswith(("step", "train/"))} for row in rows]
    return [{name: float(value) for name, value in row.items()} for row in kept if len(row) > 1]


if __name__ == "__main__":
    main()
