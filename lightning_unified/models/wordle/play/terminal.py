"""The game on a terminal: coloured rows.

Terminals without colours show the marks in letters: g green, y yellow, x gray.
"""

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from lightning_unified.models.wordle.game.feedback import code_of, marks
from lightning_unified.models.wordle.game.state import MAX_TURNS, State, Turn
from lightning_unified.models.wordle.game.words import LENGTH, WordList
from lightning_unified.models.wordle.play.games import Game, GameReport
from lightning_unified.models.wordle.prompts import parse

__all__ = ["board", "comparison", "keyboard", "read_marks", "row", "verdict"]

_MARKS = "xyg"  # by `GRAY`, `YELLOW`, `GREEN`
_STYLES = ("white on grey37", "black on yellow3", "black on green3")
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


def row(turn: Turn, *, hidden: bool = False) -> Text:
    """Return a guess in colours with its marks in letters; `hidden` shows colours only."""
    shown = Text()
    for letter, mark in zip(turn.guess, marks(turn.code), strict=True):
        shown.append(f" {' ' if hidden else letter.upper()} ", style=_STYLES[mark])
    return shown.append(f"  {''.join(_MARKS[mark] for mark in marks(turn.code))}", style="dim")


def keyboard(state: State, *, colours: bool = True) -> Text:
    """Return a keyboard with each letter's best mark so far.

    The mark is a colour, or g, y or x behind the letter.
    """
    best: dict[str, int] = {}
    for turn in state.turns:
        for letter, mark in zip(turn.guess, marks(turn.code), strict=True):
            best[letter] = max(best.get(letter, mark), mark)
    shown = Text()
    for number, letters in enumerate(_ROWS):
        shown.append("\n" * (number > 0) + "  " * number)
        for letter in letters:
            mark = "" if colours or letter not in best else _MARKS[best[letter]]
            shown.append(f" {letter}{mark or ' '}", style=_STYLES[best[letter]] if letter in best else "")
    return shown


def board(game: Game, words: WordList, *, thoughts: bool = False) -> list[Text]:
    """Return a row for each try of a game; with `thoughts`, after the player's text."""
    turns, shown = iter(game.state.turns), []
    for text in game.answers:
        if thoughts:
            shown.append(Text(text, style="dim"))
        guess = parse(text).guess
        if guess in words.index:
            shown.append(row(next(turns)))
        else:
            shown.append(Text("no guess" if guess is None else f"{guess} is no word of the list", style="red"))
    return shown


def verdict(game: Game) -> str:
    """Return one line with the result of a game."""
    if game.state.solved:
        return f"{game.secret.upper()} found in {len(game.answers)} of {MAX_TURNS}."
    return f"{game.secret.upper()} not found."


def comparison(reports: dict[str, GameReport]) -> Table:
    """Return a table with one row for each player."""
    table = Table(box=SIMPLE, pad_edge=False, caption="95 % Wilson interval; tries of games won; shares of all answers")
    table.add_column("player", no_wrap=True)
    for heading in ("games", "won", "tries", "form", "valid", "consistent"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, report in reports.items():
        low, high = report.win_interval
        table.add_row(
            name,
            str(report.games),
            f"{report.win_rate:.1%} ({100 * low:.1f}-{100 * high:.1f})",
            "-" if report.mean_turns is None else f"{report.mean_turns:.2f}",
            *(f"{share:.1%}" for share in (report.format_share, report.valid_share, report.consistent_share)),
        )
    return table


def read_marks(text: str) -> int:
    """Return the code of marks written as letters: g green, y yellow, x gray.

    Raises:
        ValueError: If it is not five of these letters.
    """
    text = text.strip().lower()
    if len(text) != LENGTH or set(text) - set(_MARKS):
        raise ValueError(f"{text!r} is not {LENGTH} marks; write g for green, y for yellow, x for gray, as in xgyxx.")
    return code_of([_MARKS.index(letter) for letter in text])
