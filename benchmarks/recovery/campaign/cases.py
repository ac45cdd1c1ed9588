"""The cases of the fault campaign: for each kind of fault, how one is drawn at random."""

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.recovery.campaign.fault_kinds import SAVE_POINTS, STEP_POINTS, TEXTS, Fault
from benchmarks.recovery.campaign.recipes import NORMS, Recipe, draw_recipe
from lightning_unified.hardware.pressure.reader import Level
from lightning_unified.hardware.simulated import PROFILES

__all__ = ["KINDS", "Case", "Leg", "draw_case"]

MIB = 2**20
STOPS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """One start of the run, from the newest checkpoint there is; what is to happen in it.

    Attributes:
        faults: At points of the training.
        wall: Rows that do not fit at once, from a batch, to a batch.
        text: Key of `TEXTS`, what the wall says.
        number: A signal from outside, or 0.
        moment: When, as a share of the time that an undisturbed run trains.
        limit: Bytes that the address space may grow by from the first batch on (RLIMIT_AS), or None.
        simulate: The name of a machine that is not here, with `budget`.
        budget: Bytes of the simulated device that the run may use.
        pressure: Spans of batches and the level of pressure in them; empty without a guard.
        stop: Whether the guard may end the run.
    """

    faults: tuple[Fault, ...] = ()
    wall: tuple[int, int, int] | None = None
    text: str = "cpu"
    number: int = 0
    moment: float = 0.0
    limit: int | None = None
    simulate: str | None = None
    budget: int = 0
    pressure: tuple[tuple[int, int, Level], ...] = ()
    stop: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run of the campaign.

    Attributes:
        index: With the campaign's seed, decides everything.
        kind: A name of `KINDS`.
        recipe: What is trained.
        legs: The starts that are disturbed; the run is then resumed undisturbed until it ends.
        may_stop: Names of the errors with which a leg may end, to be resumed.
    """

    index: int
    kind: str
    recipe: Recipe
    legs: tuple[Leg, ...]
    may_stop: tuple[str, ...] = ()


def draw_case(seed: int, index: int, kind: str) -> Case:
    """Return the case of this number and kind, always the same one."""
    draw = random.Random(f"{seed}/{index}/{kind}")
    return KINDS[kind](draw, index)


def _fault(draw: random.Random, recipe: Recipe, point: str, **fixed: object) -> Fault:
    batch = draw.randrange(recipe.batches - 1)
    if point in {"on_before_optimizer_step", "before_weights", "between_groups"}:
        place = min((batch % recipe.batches_an_epoch // recipe.window + 1) * recipe.window, recipe.batches_an_epoch) - 1
        batch = batch // recipe.batches_an_epoch * recipe.batches_an_epoch + place
    nth = draw.choice([1, 1, 2])
    once = {"on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "before_weights", "between_groups"}
    drawn = {
        "what": "memory",
        "point": point,
        "batch": batch,
        "nth": 1 if point in once else nth,
        "times": draw.randint(1, 1 if point == "prepare" else max(1, recipe.halvings)),
        "text": draw.choice(list(TEXTS)),
    }
    return Fault(**{**drawn, **fixed})  # type: ignore[arg-type]


def _point(draw: random.Random, recipe: Recipe) -> str:
    points = [point for point in STEP_POINTS if point not in {"prepare", "loss_weight", "between_groups"}]
    if recipe.model in {"fields", "totals", "grpo"}:
        points.append("prepare")
    if recipe.model == "weighted" and recipe.micro != "auto":
        points.append("loss_weight")
    return draw.choice(points)


def _memory(draw: random.Random, index: int) -> Case:
    """An injected error at one point, once or several times in a row."""
    recipe = draw_recipe(draw)
    fault = _fault(draw, recipe, _point(draw, recipe))
    return Case(index=index, kind="memory", recipe=recipe, legs=(Leg(faults=(fault,)),), may_stop=("HalfUpdatedError",))


def _operation(draw: random.Random, index: int) -> Case:
    """An injected error at the n-th operation that makes a tensor.

    It strikes in a batch, a validation or a save.
    """
    recipe = draw_recipe(draw)
    point = draw.choice(["operation", "operation", "validation operation", "save operation"])
    fault = _fault(draw, recipe, point, nth=int(250 ** draw.random()), times=draw.choice([1, 1, 2]))
    stops = ("HalfUpdatedError", "CheckpointError")
    return Case(index=index, kind="any operation", recipe=recipe, legs=(Leg(faults=(fault,)),), may_stop=stops)


def _many(draw: random.Random, index: int) -> Case:
    """Several failures, of several points, in batches of their own or the same."""
    recipe = draw_recipe(draw)
    faults = {_fault(draw, recipe, _point(draw, recipe), times=1) for _ in range(draw.randint(2, 4))}
    legs = (Leg(faults=tuple(sorted(faults, key=repr))[: max(1, recipe.halvings)]),)
    return Case(index=index, kind="several", recipe=recipe, legs=legs, may_stop=("HalfUpdatedError",))


def _half_step(draw: random.Random, index: int) -> Case:
    """Memory runs out between two groups of weights, of which the first is written already."""
    recipe = draw_recipe(draw)
    fault = _fault(draw, recipe, "between_groups", times=1)
    stops = () if recipe.rollback else ("HalfUpdatedError",)
    return Case(index=index, kind="half-written step", recipe=recipe, legs=(Leg(faults=(fault,)),), may_stop=stops)


def _wall(draw: random.Random, index: int) -> Case:
    """Parts above a size do not fit, for a while or to the end."""
    recipe = draw_recipe(draw)
    leg = Leg(wall=_wall_in(draw, recipe), text=draw.choice(list(TEXTS)))
    return Case(index=index, kind="wall", recipe=recipe, legs=(leg,))


def _wall_in(draw: random.Random, recipe: Recipe) -> tuple[int, int, int]:
    # what a module's loss is a mean over can only be found where two units of rows fit at once
    undeclared = recipe.model in {"tokens", "shifted"}
    paired = recipe.model in NORMS  # an odd number of rows in micro-batches of two or more has one of three
    units, fewest = recipe.rows_at_once() // recipe.unit, max(recipe.fewest // recipe.unit + paired, 1 + undeclared)
    first = draw.randrange(recipe.batches)
    rows = recipe.unit * draw.randint(fewest, max(units - 1, fewest))
    return rows, first, draw.choice([recipe.batches, first + draw.randint(1, recipe.batches)])


def _elastic(draw: random.Random, index: int) -> Case:
    """Walls and pressure that come and go in a run that is long enough to grow back after each."""
    recipe = draw_recipe(
        draw, batch=(batch := 8), rows=batch * 20, epochs=2, max_steps=-1, patience=draw.randint(1, 4), save_every=10
    )
    squeezes = tuple(
        Fault(what=draw.choice(["shrink", "grow"]), point="end of batch", batch=batch)
        for batch in sorted(draw.sample(range(recipe.batches), draw.randint(1, 6)))
    )
    leg = Leg(faults=squeezes, wall=_wall_in(draw, recipe), text=draw.choice(list(TEXTS)))
    return Case(index=index, kind="come and go", recipe=recipe, legs=(leg,))


def _pressure(draw: random.Random, index: int) -> Case:
    """Memory pressure that the guard's thread notices.

    The guard shrinks the size, saves, stops the run, and lets the size grow again.
    """
    recipe = draw_recipe(draw)
    spans = tuple(
        (first, first + draw.randint(2, 8), draw.choice(["warn", "critical", "critical"]))
        for first in sorted(draw.sample(range(recipe.batches), 2))
    )
    legs = (Leg(pressure=spans, stop=True), Leg(pressure=spans, stop=False))
    return Case(index=index, kind="pressure", recipe=recipe, legs=legs[draw.randint(0, 1) :])


def _limit(draw: random.Random, index: int) -> Case:
    """A real limit on the address space, in which whole batches do not fit."""
    leg = Leg(limit=draw.randint(28, 80) * MIB)
    return Case(index=index, kind="RLIMIT_AS", recipe=_wide(draw), legs=(leg,))


def _simulated(draw: random.Random, index: int) -> Case:
    """A simulated device with a small budget.

    Its allocator counts, and refuses with its backend's error message.
    """
    leg = Leg(simulate=draw.choice(list(PROFILES)), budget=draw.randint(32, 80) * MIB)
    return Case(index=index, kind="simulated device", recipe=_wide(draw), legs=(leg,))


def _wide(draw: random.Random) -> Recipe:
    batch = draw.choice([16, 24, 32])
    rows, micro = batch * 3 - draw.choice([0, 5]), draw.choice(["auto", "auto", batch // 2])
    return draw_recipe(draw, model="wide", batch=batch, rows=rows, micro=micro, precision="32-true")


def _validation(draw: random.Random, index: int) -> Case:
    """Memory runs out while validating."""
    recipe = draw_recipe(draw)
    fault = _fault(draw, recipe, "validation", times=1)
    return Case(index=index, kind="validation", recipe=recipe, legs=(Leg(faults=(fault,)),))


def _save(draw: random.Random, index: int) -> Case:
    """Memory runs out while a checkpoint is gathered or written.

    The run may end with it only if the file was required.
    """
    recipe = draw_recipe(draw)
    point = draw.choice(["save", "save: gather"])
    fault = _fault(draw, recipe, point, times=draw.randint(1, 2), nth=draw.randint(1, 4000) if point == "save" else 1)
    return Case(
        index=index,
        kind="memory at save",
        recipe=recipe,
        legs=(Leg(faults=(fault,)),),
        may_stop=("CheckpointError",),
    )


def _disk(draw: random.Random, index: int) -> Case:
    """The disk is full, or a file may not grow.

    It strikes a checkpoint being written, or every write of some batches.
    """
    recipe = draw_recipe(draw)
    what = draw.choice(["disk", "file limit"])
    point = draw.choice(["save", "any file"] if what == "file limit" else ["save", "save: share", "save: publish"])
    nth = draw.randint(1, 12_000) if point == "save" else 1
    fault = _fault(draw, recipe, point, what=what, nth=nth, times=draw.randint(1, 3))
    return Case(
        index=index, kind="disk full", recipe=recipe, legs=(Leg(faults=(fault,)),), may_stop=("CheckpointError",)
    )


def _signal(draw: random.Random, index: int) -> Case:
    """SIGINT or SIGTERM at a random moment or point.

    A second signal may strike the resumed run.
    """
    recipe = draw_recipe(draw)
    legs = tuple(_signalled(draw, recipe, draw.choice(STOPS)) for _ in range(draw.randint(1, 2)))
    return Case(index=index, kind="signal", recipe=recipe, legs=legs)


def _kill(draw: random.Random, index: int) -> Case:
    """SIGKILL at a random moment, or at a random point; perhaps again in the resumed run."""
    recipe = draw_recipe(draw)
    legs = tuple(_signalled(draw, recipe, signal.SIGKILL) for _ in range(draw.randint(1, 2)))
    return Case(index=index, kind="SIGKILL", recipe=recipe, legs=legs)


def _signalled(draw: random.Random, recipe: Recipe, number: signal.Signals) -> Leg:
    if draw.random() < 0.6:
        return Leg(number=int(number), moment=draw.random())
    point = draw.choice([_point(draw, recipe), "validation"])
    return Leg(faults=(_fault(draw, recipe, point, what="signal", number=int(number), times=1),))


def _stops(draw: random.Random, index: int) -> Case:
    """One stop or kill after the other, each in the run that was resumed from the one before."""
    recipe = draw_recipe(draw)
    legs = tuple(_signalled(draw, recipe, draw.choice([*STOPS, signal.SIGKILL])) for _ in range(draw.randint(3, 4)))
    return Case(index=index, kind="stop after stop", recipe=recipe, legs=legs)


def _kill_in_save(draw: random.Random, index: int) -> Case:
    """SIGKILL while a checkpoint is gathered, written, named, shared, or an old one removed."""
    recipe = draw_recipe(draw)
    point = draw.choice(["save", *SAVE_POINTS])
    number = int(signal.SIGKILL)
    nth = draw.randint(1, 12_000) if point == "save" else 1
    fault = _fault(draw, recipe, point, what="signal", number=number, nth=nth, times=1)
    return Case(index=index, kind="SIGKILL in save", recipe=recipe, legs=(Leg(faults=(fault,)),))


def _mixed(draw: random.Random, index: int) -> Case:
    """A wall of memory, a full disk and a signal in one run."""
    recipe = draw_recipe(draw)
    wall = _wall_in(draw, recipe)
    disk = _fault(draw, recipe, "save", what="disk", nth=draw.randint(1, 8000), times=1)
    number = draw.choice([*STOPS, signal.SIGKILL])
    legs = (Leg(faults=(disk,), wall=wall, number=int(number), moment=draw.random()), Leg(wall=wall))
    return Case(index=index, kind="mixed", recipe=recipe, legs=legs, may_stop=("CheckpointError",))


def _gpu_fault(draw: random.Random, index: int) -> Case:
    """A simulated Mac silently loses a command buffer, up to the host's next wait.

    A run that may have lost work of the optimizer stops, unless it keeps a copy of the weights.
    """
    recipe = draw_recipe(draw, precision="32-true")
    point = draw.choice(["forward", "backward", "on_before_optimizer_step"])
    fault = _fault(draw, recipe, point, what="gpu", nth=1, times=1)
    leg = Leg(faults=(fault,), simulate=draw.choice(["m1-8gb", "m2-16gb", "m5-32gb"]), budget=2048 * MIB)
    return Case(index=index, kind="GPU fault", recipe=recipe, legs=(leg,), may_stop=("GpuFaultError",))


KINDS: dict[str, Callable[[random.Random, int], Case]] = {
    "memory": _memory,
    "any operation": _operation,
    "several": _many,
    "half-written step": _half_step,
    "wall": _wall,
    "come and go": _elastic,
    "pressure": _pressure,
    "RLIMIT_AS": _limit,
    "simulated device": _simulated,
    "validation": _validation,
    "memory at save": _save,
    "disk full": _disk,
    "signal": _signal,
    "SIGKILL": _kill,
    "SIGKILL in save": _kill_in_save,
    "stop after stop": _stops,
    "mixed": _mixed,
    "GPU fault": _gpu_fault,
}
