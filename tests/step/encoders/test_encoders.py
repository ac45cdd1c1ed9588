"""Contrastive losses, exactly: named encoders run in chunks of rows.

One step computes the loss on the whole batch.
"""

import copy
import logging
import pickle
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import OutOfMemoryError
from tests.support.lanes import crossed, first_cells
from tests.support.lasting import Lasting
from tests.support.modules.contrastive import (
    Chained,
    Clip,
    Contrastive,
    Momentum,
    Nested,
    SimCLR,
    Supervised,
    Texts,
    Triplet,
    info_nce,
    is_as_plain,
    run,
)
from tests.support.modules.plain import fit, weights

KINDS = (Contrastive, SimCLR, Clip, Triplet, Supervised, Momentum, Chained, Nested, Texts)
TEXT = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"


class Fails(L.Callback):
    """Raises an out-of-memory error in the forward or backward pass of one batch.

    It does so a given number of times.
    """

    left = Lasting()

    def __init__(self, phase, *, times=1, batch=1):
        self.phase, self.left, self.batch, self.seen = phase, times, batch, -1

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen += 1
        if self.seen == self.batch:
            layer = module.net[0]
            if self.phase == "forward":
                layer.register_forward_hook(lambda *_: self.fail())
            else:
                layer.weight.register_hook(lambda *_: self.fail())

    def fail(self):
        if self.left > 0 and self.seen == self.batch:
            self.left -= 1
            raise RuntimeError(TEXT)


@first_cells(
    3,
    ("kind", "size"),
    crossed(KINDS, range(1, 9), fast=[*((kind, 3) for kind in KINDS), (SimCLR, 1), (Clip, 8), (Momentum, 5)]),
)
def test_weights_logs_and_outputs_are_those_of_plain_lightning(kind, size):
    is_as_plain(kind, run(kind, UnifiedStrategy(micro_batch_size=size)))


@first_cells(1, "kind", [SimCLR, Clip], ids=lambda kind: kind.__name__)
def test_windows_and_clipping_are_those_of_plain_lightning(kind):
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    is_as_plain(kind, run(kind, UnifiedStrategy(micro_batch_size=3), **options), **options)


@first_cells(1, "kind", [Contrastive, Clip], ids=lambda kind: kind.__name__)
def test_autocast_is_that_of_plain_lightning_but_for_rounding(kind):
    found = run(kind, UnifiedStrategy(micro_batch_size=3), precision="bf16-mixed")
    is_as_plain(kind, found, atol=2e-2, precision="bf16-mixed")


@first_cells(
    1,
    ("phase", "check"),
    crossed(["forward", "backward"], [True, False], fast=[("forward", True), ("backward", False)]),
)
def test_a_step_out_of_memory_is_repeated_in_smaller_chunks(phase, check):
    times = 1 if check else 2
    found = run(Clip, UnifiedStrategy(check_split=check), Fails(phase, times=times))
    is_as_plain(Clip, found)
    policy = found[2].strategy.policy
    assert policy.recoveries == times
    assert policy.sizing.micro_batch_size == 8 // 2**times


def test_a_check_out_of_memory_is_said_and_the_step_goes_on():
    found = run(Clip, UnifiedStrategy(), Fails("forward", times=2))  # the second time in the check
    is_as_plain(Clip, found)
    assert any("is not checked: memory ran out" in event for event in found[2].strategy.policy.events)


def test_at_the_smallest_chunk_the_run_ends_with_what_is_short():
    with pytest.raises(OutOfMemoryError):
        run(Contrastive, UnifiedStrategy(), Fails("forward", times=1000))


def test_window_mean_of_terms_needs_no_check_of_the_loss():
    found = run(Contrastive, UnifiedStrategy(micro_batch_size=3, window_mean="terms"))
    is_as_plain(Contrastive, found)


class Counting(Contrastive):
    """Notes the rows of each call and each run of its first layer."""

    def __init__(self):
        super().__init__()
        self.calls, self.firsts = [], []
        self.far = SimpleNamespace(by=SimpleNamespace(runs=[]))  # state nearer to a hook is written by first runs only

    def on_fit_start(self):
        self.net.register_forward_hook(lambda _, args, __: self.calls.append(len(args[0])))
        self.net[0].register_forward_hook(lambda _, args, __: self.firsts.append(len(args[0])))
        self.net[0].register_forward_hook(lambda _, args, __: self.far.by.runs.append(len(args[0])))


def test_a_call_runs_in_even_chunks_once_forward_and_once_backward():
    module, _, _ = run(
        Counting, UnifiedStrategy(micro_batch_size=3, check_split=False), max_epochs=1, limit_train_batches=1
    )
    assert module.calls == [8, 8]  # hooks of the encoder see whole calls
    assert module.far.by.runs == [3, 3, 2] * 2 + [2, 3, 3] * 2
    assert module.firsts == [3, 3, 2] * 2  # what a hook writes, it writes once


class ByKeyword(Contrastive):
    def __init__(self):
        super().__init__()
        self.net = Masked()

    def loss(self, batch):
        mask = torch.tensor([1.0, 1, 1, 0, 1, 1], dtype=batch["x"].dtype)
        embedded = self.net(batch["x"], texts=["a" * int(label) for label in batch["label"]], mask=mask, scale=2.0)
        return info_nce(embedded["out"], embedded["pair"][1]), embedded["out"]


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x, *, texts, mask, scale):
        lengths = torch.tensor([len(text) for text in texts]).to(x)
        out = self.inner(x * mask) * scale
        return {"out": out, "pair": (None, out + lengths[:, None], "same"), "scale": scale}


def test_arguments_by_name_lists_of_texts_and_shared_ones_are_told_apart():
    is_as_plain(ByKeyword, run(ByKeyword, UnifiedStrategy(micro_batch_size=3)))


class Dropout(Contrastive):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 4))


class Recurrent(Contrastive):
    def __init__(self):
        super().__init__()
        self.net = LastStep()


class LastStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(2, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.inner(x.view(-1, 3, 2))[0][:, -1]


class Noise(Contrastive):
    def __init__(self):
        super().__init__()
        self.net = Jitter()


class Jitter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x):
        return self.inner(x + torch.randn_like(x))


@first_cells(1, "kind", [Dropout, Recurrent, Noise], ids=lambda kind: kind.__name__)
def test_noise_drawn_for_each_chunk_is_said_once(kind):
    _, _, trainer = run(kind, UnifiedStrategy(micro_batch_size=3))
    assert sum("draws random numbers (dropout)" in event for event in trainer.strategy.policy.events) == 1


def test_an_encoder_that_cannot_be_checked_is_said_to_be_unchecked(caplog):
    with caplog.at_level(logging.WARNING, logger="lightning_unified"):
        _, _, trainer = run(Noise, UnifiedStrategy(micro_batch_size=3))
    assert sum("is not checked" in event for event in trainer.strategy.policy.events) == 1
    assert "is not checked" in caplog.text


def test_an_encoder_without_noise_is_said_to_be_row_wise():
    _, _, trainer = run(Contrastive, UnifiedStrategy(micro_batch_size=3))
    assert [event.split(":")[0] for event in trainer.strategy.policy.events] == [
        "encoder 'net', which runs in chunks of rows, treats each row by itself"
    ]


def test_the_backward_pass_draws_what_the_forward_pass_drew():
    torch.manual_seed(0)
    noisy = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).double()
    x = torch.randn(8, 6, dtype=torch.float64)

    class Sums(Contrastive):
        def __init__(self):
            super().__init__()
            self.net, self.kept = noisy, []

        def loss(self, batch):
            out = self.net(x)
            self.kept.append(out.detach())
            return out.square().sum() / 2, out

        def on_after_backward(self):
            self.gradient = self.net[0].weight.grad.clone()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    module = Sums().double()
    fit(module, Sums.loader(), strategy=UnifiedStrategy(micro_batch_size=3), max_epochs=1, limit_train_batches=1)
    torch.testing.assert_close(module.gradient, (2 * module.kept[0]).T @ x, rtol=1e-12, atol=1e-12)


def test_a_check_leaves_generators_buffers_and_attributes_as_they_were():
    class Stateful(Contrastive):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
            self.net.notes = {"calls": 0}
            self.drawn = []

        def loss(self, batch):
            found = super().loss(batch)
            self.drawn.append(float(torch.rand(())))
            return found

    found = [
        run(Stateful, UnifiedStrategy(micro_batch_size=3, batch_norm="micro", check_split=check))[0]
        for check in (True, False)
    ]
    assert found[0].drawn == found[1].drawn
    assert found[0].net.notes == {"calls": 0}
    torch.testing.assert_close(list(found[0].buffers()), list(found[1].buffers()), rtol=0, atol=0)
    torch.testing.assert_close(weights(found[0]), weights(found[1]), rtol=0, atol=0)


class EvaluationFails(L.Callback):
    left, rows = Lasting(), Lasting()

    def __init__(self):
        self.left, self.rows = 1, []

    def on_validation_start(self, trainer, module):
        self.handle = module.net[0].register_forward_hook(self.fail)

    def on_validation_end(self, trainer, module):
        self.handle.remove()

    def fail(self, _, args, __):
        self.rows = [*self.rows, len(args[0])]
        if self.left:
            self.left -= 1
            raise RuntimeError(TEXT)


def test_an_evaluation_out_of_memory_goes_on_whole_with_encoders_in_chunks():
    def values(strategy, *callbacks):
        torch.manual_seed(0)
        module = Clip().double()
        trainer = L.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, precision="64-true", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
        )  # fmt: skip
        return trainer.validate(module, Clip.loader(), verbose=False)[0]

    fails = EvaluationFails()
    assert values(UnifiedStrategy(), fails) == pytest.approx(values("auto"), abs=1e-12)
    assert fails.left == 0
    assert max(fails.rows[1:]) == 4


@pytest.mark.slow
@first_cells(1, "in_place", [False, True], ids=["wrapped", "in place"])
def test_compiled_encoders_run_in_chunks(in_place):
    class Compiled(Contrastive):
        def __init__(self):
            super().__init__()
            if in_place:
                self.net.compile(backend="aot_eager")
            else:
                self.net = torch.compile(self.net, backend="aot_eager")

    found = run(Compiled, UnifiedStrategy(micro_batch_size=3), max_epochs=1)
    is_as_plain(Contrastive, found, max_epochs=1)


def test_copies_made_in_a_step_are_plain_modules():
    class Copies(Contrastive):
        def loss(self, batch):
            self.twins = copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net))
            return super().loss(batch)

    module, _, _ = run(Copies, UnifiedStrategy(micro_batch_size=3), max_epochs=1)
    x = torch.randn(8, 6, dtype=torch.float64)
    for twin in module.twins:
        assert twin(x).shape == (8, 4)
    assert "forward" not in vars(module.net)
