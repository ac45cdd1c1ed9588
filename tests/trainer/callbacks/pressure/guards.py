"""Guards whose samples of memory pressure the tests make up."""

import json

from lightning_unified.callbacks import PressureGuard
from lightning_unified.hardware import Figure, Pressure

A_MOMENT = 0.005  # seconds


def pressure(level):
    return Pressure(
        level=level,
        available=Figure(1000, "fake available"),
        swap_out_bytes_per_s=None,
        stall_share=0.5,
        reasons=() if level == "normal" else (f"the test says {level}",),
    )


class Scripted(PressureGuard):
    """Takes `per_batch` samples right before each batch ends.

    After the script's end its last level stays.
    """

    def __init__(self, *levels, per_batch=2, **options):
        super().__init__(**options)
        self.levels, self.per_batch = list(levels), per_batch

    def reader(self):
        return lambda: pressure(self.levels.pop(0) if len(self.levels) > 1 else self.levels[0])

    def on_train_batch_end(self, *arguments):
        for _ in range(self.per_batch):
            self._watch.sample()
        super().on_train_batch_end(*arguments)


class Threaded(PressureGuard):
    """Samples in its own thread, always the same level."""

    def __init__(self, level, **options):
        super().__init__(every_s=A_MOMENT, **options)
        self.level, self.read = level, 0

    def reader(self):
        def sample():
            self.read += 1
            if self.level == "broken":
                raise OSError("as planned")
            return pressure(self.level)

        return sample


def actions(folder):
    path = folder / "pressure.jsonl"
    return [json.loads(line)["action"] for line in path.read_text().splitlines()] if path.exists() else []
