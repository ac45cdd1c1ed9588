"""The callback without CUDA, and with Python in place of replays.

tests/trainer/callbacks/test_cuda_graphs_gpu.py has the other tests.
"""

import logging
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified import CudaGraphs, UnifiedStrategy
from lightning_unified.callbacks import cuda_graphs
from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.cuda_graphs import RecordedCalls
from lightning_unified.planner.fake.fake_copy import fake_copy
from lightning_unified.planner.first_batch.step_budget import held_bytes


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1).requires_grad_(False)])

    def training_step(self, batch):
        return self.heads[0](self.network(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.1)


def fit(*callbacks, module=None, **settings):
    module = module or Module()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=UnifiedStrategy(),
        max_steps=4,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    data = DataLoader(TensorDataset(torch.randn(16, 6, generator=torch.Generator().manual_seed(1))), batch_size=4)
    trainer.fit(module, data)
    return module


def test_a_run_on_a_cpu_trains_as_without_it_and_says_that_it_does_nothing(caplog):
    torch.manual_seed(0)
    plain = fit()
    torch.manual_seed(0)
    with caplog.at_level(logging.INFO, "lightning_unified"):
        ours = fit(CudaGraphs(of="network"))

    assert "CudaGraphs does nothing on cpu" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
    assert ours.network._compiled_call_impl is None


def test_the_parts_are_the_children_that_are_called_and_trained():
    assert [name for name, _ in cuda_graphs._trained_children(Module())] == ["network", "heads.0"]


def test_a_part_that_there_is_not_is_refused_with_the_nearest():
    with pytest.raises(ConfigurationError, match=r"of='netwrk' is no part of Module; did you mean network\?"):
        fit(CudaGraphs(of="netwrk"))


def test_no_shapes_at_all_are_refused():
    with pytest.raises(ConfigurationError, match="most=0: give a whole number, 1 or more"):
        CudaGraphs(most=0)


class OnCuda(Module):
    """Says that it is on a CUDA device."""

    @property
    def device(self):
        return torch.device("cuda")


@pytest.mark.parametrize("end", ["on_train_end", "on_exception", "teardown"])
def test_the_parts_are_stood_in_for_until_the_training_ends_in_whatever_way(end):
    module, callback = OnCuda(), CudaGraphs()
    callback.on_train_start(None, module)
    assert isinstance(module.network._compiled_call_impl, RecordedCalls)

    getattr(callback, end)(*(None, module, None)[: 2 if end == "on_train_end" else 3])
    assert module.network._compiled_call_impl is None
    assert callback.recorded == {}


def test_gradients_that_lie_in_what_a_callback_holds_count_once():
    module = nn.Linear(4, 3)
    module.weight.grad, module.bias.grad = torch.zeros(3, 4), torch.zeros(3)
    found = []
    for held in ([], [torch.empty(0)], [module.weight.grad.view(-1)]):
        trainer = SimpleNamespace(lightning_module=module, optimizers=[], callbacks=[SimpleNamespace(held=held)])
        found.append(held_bytes(trainer, {}, on_host=True))

    assert found == [2 * 4 * (12 + 3)] * 3


def test_gradients_are_gathered_before_an_optimizer_makes_its_state_and_not_again(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    module, callback = OnCuda(), CudaGraphs(of="network")
    optimizer = module.configure_optimizers()
    callback.on_train_start(None, module)
    gathered = []
    for rows in (4, 5):  # new shapes, which run eagerly
        optimizer.zero_grad()
        module.training_step([torch.randn(rows, 6)]).backward()
        callback.on_before_optimizer_step(None, module, optimizer)
        own = {block.untyped_storage().data_ptr() for block in callback._parts["network"].gradients}
        gathered.append({one.grad.untyped_storage().data_ptr() for one in module.network.parameters()} == own)
        optimizer.step()

    assert gathered == [True, False]


def test_a_part_that_is_compiled_is_refused():
    module = OnCuda()
    module.network._compiled_call_impl = module.network._call_impl  # as `Module.compile` sets it
    with pytest.raises(ConfigurationError, match=r"CudaGraphs, network: .*replaced already"):
        CudaGraphs().on_train_start(None, module)


def test_the_fake_copy_that_is_planned_with_is_eager():
    module = OnCuda()
    CudaGraphs().on_train_start(None, module)

    assert fake_copy(module, device=torch.device("cpu")).network._compiled_call_impl is None
