"""Each sample counts once, wherever and however often memory runs out.

It counts once in weights, logs and metrics.
"""

from collections import Counter

import lightning as L
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import OutOfMemoryError
from tests.support.lasting import Lasting
from tests.support.modules.plain import fit

ROWS, BATCH = 14, 4
TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Counts(L.LightningModule):
    """Its gradient is how often each sample was in the batch.

    Its logged sum and its metric count the same.
    """

    def __init__(self):
        super().__init__()
        self.count = nn.Parameter(torch.zeros(ROWS, dtype=torch.float64))
        self.seen = SumMetric()

    def training_step(self, batch, batch_idx):
        picked = self.count[batch]
        self.seen(torch.ones(len(batch)))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("rows", float(len(batch)), on_step=False, on_epoch=True, reduce_fx="sum")
        return -picked.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Faults(L.Callback):
    """Raises at given calls of forward, backward and optimizer step.

    Calls are counted over the whole run.
    """

    calls = Lasting(Counter())

    def __init__(self, plan):
        self.plan = set(plan)

    def fail(self, phase):
        self.calls = self.calls + Counter([phase])
        if (phase, self.calls[phase]) in self.plan:
            raise RuntimeError(TEXT)

    def on_train_start(self, trainer, module):
        step = module.training_step

        def training_step(*args):
            loss = step(*args)
            self.fail("forward")
            return loss

        module.training_step = training_step
        module.count.register_hook(lambda _: self.fail("backward"))

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.fail("step")


plans = st.sets(st.tuples(st.sampled_from(["forward", "backward", "step"]), st.integers(1, 12)), max_size=6)


@settings(max_examples=12, deadline=None)
@given(plan=plans, window=st.sampled_from([1, 2, 3]))
def test_no_sample_is_counted_twice_or_left_out(plan, window):
    module = Counts()
    loader = DataLoader(torch.arange(ROWS), batch_size=BATCH)
    strategy = UnifiedStrategy(check_split=False)
    try:
        _, trainer = fit(
            module, loader, strategy=strategy, callbacks=[Faults(plan)], max_epochs=1, accumulate_grad_batches=window
        )
    except OutOfMemoryError:  # more faults in one step than there are sizes to try
        return

    sizes = torch.tensor([BATCH] * 12 + [2] * 2, dtype=torch.float64)
    torch.testing.assert_close(module.count.detach(), 1 / sizes / window, rtol=1e-12, atol=1e-12)
    assert float(trainer.callback_metrics["seen"]) == ROWS
    assert float(trainer.callback_metrics["rows"]) == ROWS
    assert strategy.recoveries == 0 or plan
