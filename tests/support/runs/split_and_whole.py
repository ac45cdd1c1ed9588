"""A fit in micro-batches, compared with the same fit under plain Lightning."""

import pytest
import torch

from lightning_unified import UnifiedStrategy
from tests.support.modules.plain import fit, weights

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def run(kind, strategy, loader=None, **options):
    torch.manual_seed(0)
    module = kind().double()
    options = {key: value() if key == "callbacks" else value for key, value in options.items()}
    return module, *fit(module, loader() if loader else module.loader(), strategy=strategy, **options)


def same_cut_and_whole(kind, *, size=3, loader=None, check_split=True, **options):
    """Train whole under plain Lightning and split under ours; return both recorders.

    Gradients, weights, logs and losses must agree.
    """
    whole, plain, plain_trainer = run(kind, "auto", loader, **options)
    strategy = UnifiedStrategy(micro_batch_size=size, check_split=check_split)
    module, seen, trainer = run(kind, strategy, loader, **options)
    torch.testing.assert_close(torch.stack(seen.gradients), torch.stack(plain.gradients), **EXACT)
    torch.testing.assert_close(weights(module), weights(whole), **EXACT)
    for step, (mine, theirs) in enumerate(zip(seen.callback_metrics, plain.callback_metrics, strict=True)):
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-7), f"step {step}"
    assert {key: float(value) for key, value in trainer.callback_metrics.items()} == pytest.approx(
        {key: float(value) for key, value in plain_trainer.callback_metrics.items()}, rel=1e-6
    )
    for mine, theirs in zip(seen.outputs, plain.outputs, strict=True):
        torch.testing.assert_close(mine["loss"], theirs["loss"], **EXACT)
    return seen, plain
