"""On a CUDA device: scores come from host or device, and the record equals a CPU's.

Run with `-m gpu`.
"""

import pytest
import torch

from lightning_unified.models.compressor.evaluation.evaluate import EvaluationOptions, evaluate
from lightning_unified.models.compressor.module import Compressor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("reading", ["infill", "copy"])
def test_a_model_on_the_device_is_judged_as_on_a_cpu(subject, texts, reading):
    torch.manual_seed(0)
    module = Compressor(preset="compressor-tiny", reading=reading, text_length=32)
    module.tokenizer, module.trained_steps = subject.tokenizer, 1
    options = EvaluationOptions(keeps=[0.5], length=24, continuation=8, resamples=50, repeats=1)

    on_cpu = evaluate(module, texts, corpus=texts, options=options)
    on_device = evaluate(module.cuda(), texts, corpus=texts, options=options)

    for here, there in zip(on_cpu["rows"], on_device["rows"], strict=True):
        assert there["method"] == here["method"]
        assert there["dropped_cross_entropy"]["mean"] == pytest.approx(here["dropped_cross_entropy"]["mean"], rel=1e-3)
