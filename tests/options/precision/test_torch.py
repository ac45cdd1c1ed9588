"""Facts about torch that the gate relies on: autocast's tables, and what a scaler needs."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

tables = torch._C._dispatch_get_registrations_for_dispatch_key


def test_the_old_autocast_takes_no_device_and_the_new_one_does():
    with (
        pytest.warns(FutureWarning, match="deprecated"),
        pytest.raises(TypeError, match="unexpected keyword argument 'device_type'"),
    ):
        torch.cuda.amp.autocast(device_type="mps")
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.autocast("mps", dtype=dtype)._enabled


def test_autocast_is_float16_on_gpus_and_bfloat16_on_cpus_if_nobody_says():
    assert [torch.get_autocast_dtype(kind) for kind in ("mps", "cuda", "cpu")] == [
        torch.float16,
        torch.float16,
        torch.bfloat16,
    ]


def test_autocast_to_float32_on_mps_is_disabled_with_a_warning():
    with pytest.warns(UserWarning, match=r"(?s)In MPS autocast.*Disabling autocast"):
        assert not torch.autocast("mps", dtype=torch.float32)._enabled


def test_autocast_on_mps_has_fewer_rules_than_on_cuda():
    assert len(tables("AutocastMPS")) < len(tables("AutocastCUDA"))


@pytest.mark.parametrize(
    ("operator", "since"),
    [("binary_cross_entropy", "2.11"), ("gru_cell", "2.11"), ("rms_norm", "2.13")],
)
def test_operators_that_cuda_has_a_rule_for_and_mps_has_not(operator, since):
    if TorchVersion(torch.__version__) < since:
        pytest.skip(f"CUDA's rule is there since torch {since}")

    assert f"aten::{operator}" in tables("AutocastCUDA")
    assert f"aten::{operator}" not in tables("AutocastMPS")


def test_the_loss_that_is_advised_instead_has_a_rule_on_mps():
    assert "aten::binary_cross_entropy_with_logits" in tables("AutocastMPS")


@contextmanager
def rules_of(kind, key):
    """Use the autocast rules of a device that is not here on tensors of the CPU."""
    torch.set_autocast_enabled(kind, True)
    torch._C._dispatch_tls_set_dispatch_key_included(key, True)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(key, False)
        torch.set_autocast_enabled(kind, False)


def test_binary_cross_entropy_in_float16_is_refused_on_cuda_and_computed_on_mps():
    probabilities, labels = torch.rand(4).half(), torch.ones(4).half()
    with rules_of("cuda", "AutocastCUDA"), pytest.raises(RuntimeError, match="BCELoss are unsafe to autocast"):
        nn.BCELoss()(probabilities, labels)
    with rules_of("mps", "AutocastMPS"):
        assert nn.BCELoss()(probabilities, labels).dtype == torch.float16


def test_a_scaler_is_live_without_a_device_on_mps_and_not_on_cuda():
    if torch.cuda.is_available():
        pytest.skip("what is seen here is the absence of CUDA")
    with pytest.warns(UserWarning, match="CUDA is not available"), pytest.warns(FutureWarning, match="deprecated"):
        old = torch.cuda.amp.GradScaler()
    loss = torch.tensor(3.0)

    assert not old.is_enabled() and old.scale(loss).item() == 3.0
    assert torch.amp.GradScaler("mps").is_enabled()


@pytest.mark.parametrize(("fused", "reads"), [(False, 1), (True, 0)])
def test_a_step_with_a_scaler_waits_for_one_number_from_the_device(monkeypatch, fused, reads):
    """bf16 needs no scaler and never waits.

    A fused optimizer decides on the device.
    """
    module, scaler = nn.Linear(3, 1), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(module.parameters(), 0.1, fused=fused)
    scaler.scale(module(torch.ones(2, 3)).sum()).backward()
    read, real = [], torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: (read.append(1), real(self))[1])
    scaler.step(optimizer)

    assert len(read) == reads
