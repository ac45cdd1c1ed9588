"""Run one case to its end, through all its deaths, and compare it with undisturbed runs."""

import signal
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.recovery.campaign.cases import Case, Leg
from benchmarks.recovery.campaign.comparing import ROUNDING, counts, difference, logs_differ, other_state
from benchmarks.recovery.campaign.faults import STRIKES, Disturbance, Felt
from benchmarks.recovery.campaign.processes import Ended, Kill, in_process
from benchmarks.recovery.campaign.training import FINAL, STARTED, Fit, read_ledger, train

__all__ = ["Row", "judge"]

_SAID = "is written once a micro-batch of a split batch"
_SLOWER = 2.0  # a run with the strategy and faults in seconds of a plain one's training: only so that moments spread over the run


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What became of one case.

    Attributes:
        index: The case's number.
        kind: Its kind.
        model: What was trained.
        what: The recipe and what went wrong, in short.
        ended: "went on" (never stopped), "resumed" (stopped or killed, and resumed to the end), or "lost".
        starts: How often it was started.
        steps: Optimizer steps of the undisturbed run.
        steps_lost: Those that the disturbed one lacks at its end.
        steps_redone: Those that a resumed run did again, for they came after the last checkpoint.
        difference: Of the final weights to those of an undisturbed run whose batches are cut alike; relative, 0.0 is every bit.
        other_state: What else of the final state differs from that run's: optimizer, buffers, schedules, scaler, random states.
        logs_differ: Whether a batch's loss does, or a figure logged at the end of a run that was neither stopped nor asked to.
        rounding: Difference of the weights to plain Lightning's, whose batches are whole; None where cutting changes more than rounding.
        counted_twice: Rows that counted more in a step than in plain Lightning's.
        missed: Rows that counted less.
        struck: How often something went wrong; of a real limit only what was recovered from in the last start is known.
        recoveries: Steps repeated, in the last start.
        said: Whether it said of state that it may differ: the step writes it, and memory never sufficed for a check of two rows.
        hung: Whether a process had to be ended because its time was over.
        notes: Errors met on the way, or what is wrong.
        seconds: All processes of the case together.
    """

    index: int
    kind: str
    model: str
    what: str
    ended: str
    starts: int
    steps: int
    steps_lost: int
    steps_redone: int
    difference: float | None
    other_state: list[str]
    logs_differ: bool | None
    rounding: float | None
    counted_twice: int
    missed: int
    struck: int
    recoveries: int
    said: bool
    hung: bool
    notes: list[str]
    seconds: float

    @property
    def sound(self) -> bool:
        """Whether nothing was lost, and nothing differs of which the run did not say so."""
        lost = self.steps_lost or self.counted_twice or self.missed or self.hung
        return self.ended != "lost" and not lost and (self.is_same or self.said)

    @property
    def is_same(self) -> bool:
        """Whether weights, state and logs are those of an undisturbed run."""
        near = self.rounding is None or self.rounding <= ROUNDING
        return self.difference == 0.0 and not self.other_state and not self.logs_differ and near


@dataclass(kw_only=True)
class _Story:
    """What has happened to a case so far."""

    starts: int = 0
    redone: int = 0
    unsaved: int = 0
    signals: int = 0
    seconds: float = 0.0
    hung: bool = False
    notes: list[str] = field(default_factory=list)

    def add(self, ended: Ended) -> None:
        self.seconds += ended.seconds
        self.hung |= ended.hung
        self.signals += ended.was_signalled


def judge(case: Case, folder: Path, *, timeout: float) -> Row:
    """Run the case, its undisturbed twin and plain Lightning, and compare them.

    Each runs in a process of its own.

    Args:
        case: What to run.
        folder: For everything they write.
        timeout: Seconds after which a process hangs.
    """
    story = _Story()
    plain = _undisturbed(Fit(recipe=case.recipe, folder=folder / "plain", plain=True), story, timeout)
    batches = plain["batches"] if plain else case.recipe.batches
    final = _disturbed(
        case, folder / "run", story, timeout=timeout, usual=_SLOWER * _trained_for(folder / "plain"), batches=batches
    )
    twin = None
    if final is not None:
        sizes = {number: line["sizes"] for number, line in read_ledger(folder / "run").items()}
        twin = _undisturbed(Fit(recipe=case.recipe, folder=folder / "twin", replay=sizes), story, timeout)
    return _row(case, story, plain=plain, final=final, twin=twin, folder=folder)


def _undisturbed(fit: Fit, story: _Story, timeout: float) -> dict[str, Any] | None:
    fit.folder.mkdir(parents=True)
    ended = in_process(partial(train, fit), log=fit.folder / "log", timeout=timeout)
    story.add(ended)
    if ended.code:
        story.notes.append(f"{fit.folder.name}, to compare with, ended with {_in_words(ended)}")
        return None
    return torch.load(fit.folder / FINAL, weights_only=False)


def _disturbed(
    case: Case, folder: Path, story: _Story, *, timeout: float, usual: float, batches: int
) -> dict[str, Any] | None:
    """Start the run again from its newest checkpoint until it has ended; None if it cannot be."""
    folder.mkdir(parents=True)
    newest = folder / "checkpoints" / "last.ckpt"
    for leg in (*case.legs, Leg()):
        (folder / STARTED).unlink(missing_ok=True)
        resume = newest if newest.exists() else None
        story.redone += _steps_done(folder) - _steps_saved(resume)
        disturbance = Disturbance(leg.faults, wall=leg.wall, text=leg.text, limit=leg.limit)
        machine = {"simulate": leg.simulate, "budget": leg.budget, "predict": False} if leg.simulate else {}
        guard = (Felt(leg.pressure, stop=leg.stop),) if leg.pressure else ()
        fit = Fit(recipe=case.recipe, folder=folder, resume=resume, callbacks=(disturbance, *guard), strategy=machine)
        kill = None
        if leg.number:
            kill = Kill(number=signal.Signals(leg.number), after=leg.moment * usual, started=folder / STARTED)
        ended = in_process(partial(train, fit), log=folder / "log", timeout=timeout, kill=kill)
        story.starts += 1
        story.add(ended)
        if (folder / FINAL).exists():
            final = torch.load(folder / FINAL, weights_only=False)
            if final["batches"] == batches:
                return final
            (folder / FINAL).unlink()
            story.unsaved += final["steps"] - _steps_saved(newest)
        elif not _may_end_so(ended, case, leg):
            story.notes.append(f"ended with {_in_words(ended)}")
            return None
        elif ended.error:
            story.notes.append(ended.error)
    story.notes.append("did not end, though its last start was not disturbed")
    return None


def _may_end_so(ended: Ended, case: Case, leg: Leg) -> bool:
    """Return whether the leg may end this way.

    Allowed are its signal, or an error that the case permits.
    """
    if ended.hung:
        return False
    numbers = {leg.number, *(fault.number for fault in leg.faults)} - {0}
    # before and after the batches Lightning ends a run that gets SIGINT, with code 1
    interrupted = signal.SIGINT in numbers and ended.code == 1 and ended.error in {"", "KeyboardInterrupt"}
    terminated = signal.SIGTERM in numbers and ended.error == "SIGTERMException"
    return -ended.code in numbers or interrupted or terminated or ended.error in case.may_stop


def _is_signalled(case: Case) -> bool:
    """Return whether it was asked to stop, and may have left out its last validation."""
    return any(leg.number or leg.pressure or any(fault.number for fault in leg.faults) for leg in case.legs)


def _in_words(ended: Ended) -> str:
    if ended.hung:
        return "nothing: it hung"
    return f"{ended.error}: {ended.text[:400]}" if ended.error else f"code {ended.code}"


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _trained_for(folder: Path) -> float:
    times = [line["at"] for line in read_ledger(folder).values()]
    return max(times, default=0.0) - min(times, default=0.0)


def _steps_done(folder: Path) -> int:
    return max((line["step"] for line in read_ledger(folder).values()), default=0)


def _steps_saved(file: Path | None) -> int:
    return int(torch.load(file, weights_only=False)["global_step"]) if file is not None and file.exists() else 0


def _row(
    case: Case,
    story: _Story,
    *,
    plain: dict[str, Any] | None,
    final: dict[str, Any] | None,
    twin: dict[str, Any] | None,
    folder: Path,
) -> Row:
    steps, recoveries = plain["steps"] if plain else 0, final["recoveries"] if final else 0
    limited = any(leg.limit or leg.simulate for leg in case.legs)
    noticed = (folder / "run" / "pressure.jsonl").exists()
    compared: dict[str, Any] | None = None
    if plain is not None and final is not None and twin is not None:
        compared = _compared(case, folder, plain=plain, final=final, twin=twin, whole=story.starts == 1)
    unknown = {"difference": None, "logs_differ": None, "rounding": None}
    return Row(
        index=case.index,
        kind=case.kind,
        model=case.recipe.model,
        what=_what(case),
        ended="lost" if compared is None else "went on" if story.starts == 1 else "resumed",
        starts=story.starts,
        steps=steps,
        steps_lost=steps - (final["steps"] if final else 0) + story.unsaved,
        steps_redone=story.redone,
        struck=story.signals + _size(folder / "run" / STRIKES) + (recoveries if limited else 0) + noticed,
        recoveries=recoveries,
        said=_SAID in (folder / "run" / "log").read_text(encoding="utf-8", errors="replace"),
        hung=story.hung,
        notes=story.notes,
        seconds=round(story.seconds, 2),
        **(compared or {**unknown, "other_state": [], "counted_twice": 0, "missed": 0}),
    )


def _compared(
    case: Case, folder: Path, *, plain: dict[str, Any], final: dict[str, Any], twin: dict[str, Any], whole: bool
) -> dict[str, Any]:
    mine, twins, plains = (read_ledger(folder / name) for name in ("run", "twin", "plain"))
    counted_twice, missed = counts(mine, plains)
    return {
        "difference": difference(final["weights"], twin["weights"]),
        "rounding": difference(final["weights"], plain["weights"]) if case.recipe.exact else None,
        "other_state": other_state(final, twin),
        "logs_differ": logs_differ(final, twin, mine, twins, whole=whole and not _is_signalled(case)),
        "counted_twice": counted_twice,
        "missed": missed,
    }


def _what(case: Case) -> str:
    recipe = case.recipe
    text = f"batch {recipe.batch}, micro {recipe.micro}, window {recipe.window} of {recipe.window_mean}, {recipe.optimizer}, {recipe.precision}"
    for leg in case.legs:
        text += "; " + ", ".join(
            [f"{fault.what} at {fault.point} of batch {fault.batch} x{fault.times}" for fault in leg.faults]
            + ([f"at most {leg.wall[0]} rows in batches {leg.wall[1]} to {leg.wall[2]}"] if leg.wall else [])
            + ([f"address space {leg.limit // 2**20} MiB"] if leg.limit else [])
            + [f"{level} in batches {first} to {end}" for first, end, level in leg.pressure]
            + ([f"{leg.simulate} with {leg.budget // 2**20} MiB"] if leg.simulate else [])
            + ([f"{signal.Signals(leg.number).name} after {leg.moment:.0%}"] if leg.number else [])
        )
    return text
