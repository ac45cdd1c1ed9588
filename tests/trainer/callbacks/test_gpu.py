"""On a CUDA device: no callback waits for it, and a resume continues its random stream.

Run with `-m gpu`.
"""

import pytest
import torch

from lightning_unified.callbacks import GradientHealth, MemoryMonitor, RunCheckpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_monitor_and_gradient_health_do_not_wait_for_the_device(small_run, tmp_path):
    """CUDA raises where the host waits for it.

    This covers the hooks of both callbacks, between two readings.
    """
    monitor, health = MemoryMonitor(every_n_batches=1), GradientHealth()
    module, trainer = small_run.build(tmp_path, accelerator="gpu", devices=1)
    module.cuda()
    optimizer = torch.optim.SGD(module.parameters())
    module.net(torch.ones(4, 6, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            monitor.on_before_backward(trainer, module, torch.zeros(()))
            monitor.on_before_optimizer_step(trainer, module, optimizer)
            health.on_before_optimizer_step(trainer, module, optimizer)
            monitor.on_train_batch_end(trainer, module, None, None, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert health.state_dict() == {"nonfinite_steps": 0, "nan_steps": 0, "inf_steps": 0}


@pytest.mark.parametrize("batches", [4, 5, 7])
def test_dropout_on_the_device_goes_on_after_a_resume(small_run, tmp_path, batches):
    options = {"accelerator": "gpu", "devices": 1}
    straight, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "a")], **options)
    callbacks = [small_run.StopAfterBatch(batches), RunCheckpoint(tmp_path / "b")]
    small_run.fit(tmp_path, callbacks=callbacks, **options)
    last = tmp_path / "b/last.ckpt"
    resumed, _ = small_run.fit(tmp_path, callbacks=[RunCheckpoint(tmp_path / "b")], seed=99, resume=last, **options)

    assert small_run.same_weights(straight.cpu(), resumed.cpu())
