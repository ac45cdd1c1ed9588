"""A planner that notes its calls, in place of the real one."""

import contextlib
from types import SimpleNamespace
from unittest.mock import patch

from lightning_unified.cost_model import rates
from lightning_unified.cost_model.plan import Plan
from lightning_unified.cost_model.prediction import Prediction
from lightning_unified.cost_model.search import Candidate
from lightning_unified.planner import predict

GIB = 2**30


class Calls:
    """A planner that notes what it is asked and answers that `need` bytes are taken."""

    def __init__(self, need=GIB):
        self.need, self.one, self.many = need, [], []

    def plan(self, module, batch, **options):
        self.one.append(SimpleNamespace(module=module, batch=batch, **options))
        return self._made(options["budget"], options["precision"])

    def plan_many(self, module, batch, machines, **options):
        self.many.append(SimpleNamespace(machines=machines, **options))
        return {name: self._made(budget, options["precision"]) for name, (_, budget, _) in machines.items()}

    def _made(self, budget, precision):
        usual = {"precision": precision, "recompute": None}
        if self.need > budget:
            least = Candidate(
                micro_batch_size=1,
                num_micro_batches=8,
                precision=precision,
                recompute="none",
                optimizer_kernel=None,
                loss_chunk=None,
                peak_bytes=self.need,
                reserved_bytes=self.need,
                seconds=0.5,
                fits=False,
            )
            return Plan(micro_batch_size=None, budget_bytes=budget, alternatives=(least,), **usual)
        peak = Prediction(
            peak_bytes=self.need,
            reserved_bytes=self.need,
            categories={"weights": self.need},
            confidence="high",
            seconds=0.5,
            instant="backward",
            rows=2,
            num_micro_batches=4,
        )
        return Plan(micro_batch_size=2, budget_bytes=budget, prediction=peak, **usual)

    @property
    def call(self):
        return self.one[-1]

    @contextlib.contextmanager
    def in_place(self):
        """Answer for the planner."""
        with (
            patch.object(predict, "plan", self.plan),
            patch.object(predict, "plan_many", self.plan_many),
            patch.object(rates, "tabled_rates", lambda name: f"rates of {name}"),
        ):
            yield
