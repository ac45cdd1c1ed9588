"""Draw the settings of one run of a campaign at random.

They are model, optimizer, batch, window, sizes, validation and checkpoints.
"""

import random
from dataclasses import dataclass
from typing import Literal

__all__ = ["MODELS", "Recipe", "draw_recipe"]

# What cutting leaves as it is: the gradient ("exact"), or only the distribution it is drawn from ("noise", "statistics").
# Beside these there is "wide", whose activations are MiBs a row, for limits that are real.
MODELS = {
    "mlp": "exact",
    "dropout": "noise",
    "fields": "exact",
    "batch_norm": "statistics",
    "measures": "exact",
    "tokens": "exact",
    "shifted": "exact",
    "weighted": "exact",
    "totals": "exact",
    "grpo": "exact",
    "keeps": "exact",
    "skips": "exact",
    "blocks": "noise",
    "norm_blocks": "statistics",
}
BLOCKS = {"blocks", "norm_blocks"}  # models that recomputation finds something in
NORMS = {"batch_norm", "norm_blocks"}
OPTIMIZERS = ("sgd", "adamw", "adamw fused", "adamw foreach", "adagrad")
SCHEDULES = ("none", "step", "epoch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One run that could be.

    Attributes:
        model: A name of `MODELS`, or "wide".
        optimizer: A name of `OPTIMIZERS`.
        schedule: When the learning rate changes: never, each step, each epoch.
        rows: Of the training data.
        batch: Rows of an effective batch; the last of an epoch may have fewer.
        micro: Largest micro-batch size in rows, or "auto".
        window: `accumulate_grad_batches`.
        clip: `gradient_clip_val`.
        epochs: Passes over the data.
        max_steps: Optimizer steps at which the run ends, if it has not before; -1 for none.
        validate_every: Batches between validations; None for once an epoch.
        save_every: Optimizer steps between checkpoints.
        precision: Lightning's name; "16-mixed" runs with a live scaler.
        rollback: `optimizer_rollback`.
        recompute: `recompute`.
        watched: Whether `GradientHealth` and `MemoryMonitor` are there.
        window_mean: `window_mean`.
        remember: Whether the sizes found go to a file, beside being in the checkpoints.
        patience: Batches without trouble before a larger size is tried; the package's own 32 are more than most of these runs have.
        seed: Of weights, data and noise.
    """

    model: str
    optimizer: str
    schedule: str
    rows: int
    batch: int
    micro: int | Literal["auto"]
    window: int
    clip: float | None
    epochs: int
    max_steps: int
    validate_every: int | None
    save_every: int
    precision: str
    rollback: bool
    recompute: bool | Literal["auto"]
    watched: bool
    window_mean: Literal["batches", "terms"]
    remember: bool
    patience: int
    seed: int

    @property
    def unit(self) -> int:
        """Rows that stay together."""
        return 4 if self.model == "grpo" else 1

    @property
    def batches_an_epoch(self) -> int:
        """Batches of one pass, the short last one counted."""
        return -(-self.rows // self.batch)

    @property
    def batches(self) -> int:
        """Batches of the whole run."""
        return self.epochs * self.batches_an_epoch

    @property
    def exact(self) -> bool:
        """Whether a split run ends with the weights of a whole one, up to rounding of float64."""
        return MODELS.get(self.model) == "exact" and self.precision == "64-true"

    @property
    def fewest(self) -> int:
        """The fewest rows that can run at once; statistics of one row are none."""
        return 2 if self.model in NORMS else self.unit

    @property
    def halvings(self) -> int:
        """How often in a row any batch may fail before its smallest unit has."""
        least = min(self.rows_at_once(), self.rows % self.batch or self.batch)
        return (least // self.fewest).bit_length() - 1

    def rows_at_once(self) -> int:
        """Return the rows of the largest part before any fault."""
        return self.batch if self.micro == "auto" else min(self.batch, self.micro)


def draw_recipe(draw: random.Random, **fixed: object) -> Recipe:
    """Return a recipe at random.

    Args:
        draw: Decides.
        fixed: Fields that are not drawn.
    """
    model = str(fixed.get("model", draw.choice(list(MODELS))))
    unit = 4 if model == "grpo" else 1
    batch = draw.choice([8, 12, 16] if unit > 1 else [4, 6, 8, 11])
    batches = draw.randint(4, 6)
    fewest = 2 if model in NORMS else 1  # statistics of one row are none
    short = draw.choice([0, 0, unit * draw.randint(1, batch // unit - fewest)])
    window = draw.choice([1, 1, 2, 3])
    drawn: dict[str, object] = {
        "model": model,
        "optimizer": draw.choice(OPTIMIZERS),
        "schedule": draw.choice(SCHEDULES),
        "rows": batch * batches - short,
        "batch": batch,
        "micro": draw.choice(["auto", "auto", max(unit, batch // 2), max(unit, 3)]),
        "window": window,
        "clip": draw.choice([None, 0.5]),
        "epochs": draw.choice([2, 2, 3]),
        "max_steps": draw.choice([-1, -1, -1, draw.randint(3, 2 * batches)]),
        "validate_every": draw.choice([None, None, draw.randint(2, 4)]),
        "save_every": draw.randint(1, 3),
        "precision": draw.choices(["64-true", "32-true", "16-mixed", "bf16-mixed"], [6, 2, 1, 1])[0],
        "rollback": draw.random() < 0.3,
        "recompute": draw.choice([True, "auto", "auto"]) if model in BLOCKS else "auto",
        "watched": draw.random() < 0.3,
        "window_mean": "terms" if window > 1 and draw.random() < 0.4 else "batches",
        "remember": draw.random() < 0.3,
        "patience": draw.choice([1, 2, 3, 32]),
        "seed": draw.randrange(2**31),
    }
    if str(drawn["precision"]).endswith("mixed") and drawn["optimizer"] == "adamw fused":
        drawn["clip"] = None  # Lightning refuses to clip what a fused optimizer unscales itself
    return Recipe(**{**drawn, **fixed})  # type: ignore[arg-type]
