"""A traced step takes what the real one takes, and leaves nothing behind."""

import random

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_unified.cost_model.trace.trace import CATEGORIES, Give, Take, Work
from lightning_unified.nn.second_run.projections import Projections
from tests.support.lanes import first_cells, slow
from tests.support.runs.live_bytes import Loader, live_peak, peak_of
from tests.support.zoo.dry_run import Adversaries, Convolutions, LowRank, Perceptron, Transformer, trace_step

ROWS = 8


GENERATOR = 5056  # bytes of torch's random state, which a real step notes outside of anything that is dispatched


def taken(trace, category):
    return sum(event.bytes for event in trace.events if isinstance(event, Take) and event.category == category)


def setup_bytes(trace, category):
    total, phase = 0, ""
    for event in trace.events:
        if isinstance(event, Work):
            phase = event.phase
        elif isinstance(event, Take) and phase == "setup" and event.category == category:
            total += event.bytes
    return total


def parameter_bytes(module):
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


@pytest.fixture(scope="module")
def transformed():
    return trace_step(Transformer(), Transformer.batch(4), rows=ROWS)


@first_cells(
    1,
    ("kind", "precision", "num_micro_batches"),
    [
        slow(Perceptron, "32-true", 1),
        (Perceptron, "bf16-mixed", 2),
        slow(Transformer, "32-true", 2),
        (Transformer, "bf16-mixed", 1),
    ],
)
def test_peak_is_that_of_the_real_step(kind, precision, num_micro_batches, tmp_path):
    trace = trace_step(kind(), kind.batch(4), rows=ROWS, num_micro_batches=num_micro_batches, precision=precision)
    real = live_peak(
        kind,
        kind.batch(ROWS * num_micro_batches),
        rows=ROWS,
        num_micro_batches=num_micro_batches,
        precision=precision,
        folder=tmp_path,
    )
    assert peak_of(trace) == pytest.approx(real - GENERATOR, rel=1e-4)


def test_the_optimizer_step_begins_after_the_last_micro_batch():
    trace = trace_step(Perceptron(), Perceptron.batch(4), rows=ROWS, num_micro_batches=3)
    phases = [event.phase for event in trace.events if isinstance(event, Work)]
    begins = phases.index("optimizer step")

    assert {"forward", "backward"} <= set(phases[:begins])
    assert not {"forward", "backward"} & set(phases[begins:])


@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported() or not torch.cpu._is_avx512_supported(),
    reason="measured on a processor with AVX-512 and without matrix tiles",
)
def test_peak_of_convolutions_and_batch_norm_is_that_of_the_real_step(tmp_path):
    trace = trace_step(Convolutions(), Convolutions.batch(4), rows=ROWS, precision="bf16-mixed")
    real = live_peak(Convolutions, Convolutions.batch(ROWS), precision="bf16-mixed", folder=tmp_path)
    assert peak_of(trace) == pytest.approx(real - GENERATOR, rel=2e-2)  # kernels of the CPU take the rest unseen


def test_peak_of_frozen_weights_with_a_low_rank_layer_is_that_of_the_real_step(tmp_path):
    trace = trace_step(LowRank(), LowRank.batch(4), rows=ROWS)
    assert peak_of(trace) == pytest.approx(
        live_peak(LowRank, LowRank.batch(ROWS), folder=tmp_path) - GENERATOR, rel=1e-4
    )
    assert setup_bytes(trace, "gradients") == parameter_bytes(LowRank().low)


def test_peak_of_two_optimizers_stepped_by_hand_is_that_of_the_real_step(tmp_path):
    trace = trace_step(Adversaries(), Adversaries.batch(4), rows=ROWS)
    assert peak_of(trace) == pytest.approx(live_peak(Adversaries, Adversaries.batch(ROWS), folder=tmp_path), rel=1e-3)


def test_the_peak_of_a_split_and_clipped_window_is_that_of_the_real_one(tmp_path):
    trace = trace_step(Perceptron(), Perceptron.batch(4), rows=ROWS, num_micro_batches=2, accumulate=2, clip=1.0)
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    real = live_peak(
        Perceptron, Perceptron.batch(2 * ROWS), rows=ROWS, num_micro_batches=2, steps=4, folder=tmp_path, **settings
    )
    assert peak_of(trace) == pytest.approx(real - GENERATOR, rel=1e-4)


def test_peak_with_recomputed_blocks_is_that_of_the_real_step(tmp_path):
    trace = trace_step(Transformer(), Transformer.batch(4), rows=ROWS, recompute=True)
    Projections().add(torch.zeros(1))  # its numbers stay in the process, from the first comparison on
    # both runs of the first four calls are compared, which takes memory
    real = live_peak(Transformer, Transformer.batch(ROWS), steps=5, recompute=True, folder=tmp_path)
    assert peak_of(trace) == pytest.approx(real - 3 * GENERATOR, rel=1e-4)  # each block notes the random state too


def test_a_gradient_scaler_finds_finite_gradients_and_has_weights_written():
    trace = trace_step(Perceptron(), Perceptron.batch(4), rows=ROWS, precision="16-mixed")
    ops = [event.op for event in trace.events if isinstance(event, Work)]
    assert "aten._amp_foreach_non_finite_check_and_unscale_.default" in ops
    assert "aten.addcdiv_.default" in ops
    assert any(event.dtype == "float16" for event in trace.events if isinstance(event, Work))


def test_weights_that_are_cast_for_good_take_half():
    trace = trace_step(Perceptron(), Perceptron.batch(4), rows=ROWS, precision="bf16-true")
    assert setup_bytes(trace, "weights") == parameter_bytes(Perceptron()) // 2


def test_setup_holds_weights_gradients_and_optimizer_state_with_tied_weights_once(transformed):
    module, trace = Transformer(), transformed
    weights = parameter_bytes(module)
    assert setup_bytes(trace, "weights") == setup_bytes(trace, "gradients") == weights
    counts = 4 * len(list(module.parameters()))
    assert setup_bytes(trace, "optimizer state") == 2 * weights + counts


def test_logits_are_what_is_as_wide_as_the_vocabulary(transformed):
    assert taken(transformed, "logits") >= ROWS * 32 * 512 * 4


def test_every_storage_is_given_once_and_was_taken_before():
    trace = trace_step(Perceptron(), Perceptron.batch(4), rows=ROWS)
    live = set()
    for event in trace.events:
        if isinstance(event, Take):
            assert event.storage not in live
            assert event.category in CATEGORIES
            live.add(event.storage)
        elif isinstance(event, Give):
            live.remove(event.storage)
    assert live  # weights stay


def test_events_of_different_rows_are_the_same_but_for_their_bytes(transformed):
    def kinds(trace):
        return [getattr(event, "op", None) or getattr(event, "category", event.__class__) for event in trace.events]

    sizes = []
    for rows in (2, 4):
        trace = trace_step(Transformer(), Transformer.batch(4), rows=rows)
        assert kinds(trace) == kinds(transformed)
        sizes.append([event.bytes for event in trace.events if isinstance(event, Take)])
    asked = [event.bytes for event in transformed.events if isinstance(event, Take)]
    assert asked == [2 * (four - two) + four for two, four in zip(*sizes, strict=True)]  # 8 rows


def test_phases_come_in_the_order_of_lightnings_step():
    trace = trace_step(Perceptron(), Perceptron.batch(4), rows=ROWS)
    phases = list(dict.fromkeys(event.phase for event in trace.events if isinstance(event, Work)))
    assert phases[:5] == ["setup", "batch", "forward", "backward", "optimizer step"]


def test_work_is_placed_in_its_module_in_both_directions(transformed):
    products = [event for event in transformed.events if isinstance(event, Work) and event.op == "aten.mm.default"]
    assert {"blocks.0.up", "head"} <= {event.place for event in products if event.phase == "backward"}


def test_flops_of_the_step_but_for_sums_are_three_times_those_of_its_products():
    module = Perceptron()
    trace = trace_step(module, module.batch(4), rows=ROWS)
    weights = [layer.weight.numel() for layer in module.net if isinstance(layer, nn.Linear)]
    forward = 2 * ROWS * sum(weights)
    backward = 2 * forward - 2 * ROWS * weights[0]  # no gradient for the batch
    works = [event for event in trace.events if isinstance(event, Work) and ".sum." not in event.op]
    assert sum(work.flops for work in works) == forward + backward


def test_parameters_on_the_meta_device_give_the_same_trace(transformed):
    with torch.device("meta"):
        weightless = Transformer()
    assert trace_step(weightless, Transformer.batch(4), rows=ROWS).events == transformed.events


def test_a_longer_row_is_asked_for_by_its_length():
    short, long = (Transformer(layers=1, length=64).batch(4, length=length) for length in (32, 64))
    traces = [trace_step(Transformer(layers=1, length=64), batch, rows=ROWS, length=64) for batch in (short, long)]
    assert traces[0].length == 64
    assert traces[0].events == traces[1].events


@pytest.mark.slow
def test_kernels_of_the_optimizer_take_different_temporaries():
    def most(kernel, backend="cpu"):
        module = Perceptron(width=64)
        trace = trace_step(module, module.batch(2), rows=2, optimizer_kernel=kernel, backend=backend)
        sizes, live, peak, phase = {}, 0, 0, ""
        for event in trace.events:
            if isinstance(event, Work):
                phase = event.phase
            elif isinstance(event, Take) and phase == "optimizer step":
                sizes[event.storage] = event.bytes
                live += event.bytes
                peak = max(peak, live)
            elif isinstance(event, Give):
                live -= sizes.pop(event.storage, 0)
        return peak

    assert most("fused") < most("for-loop") < most("foreach")
    assert most(None) == most("for-loop")
    assert most(None, "cuda") == most("foreach", "cuda")


def test_averaged_weights_of_a_callback_are_counted(tmp_path):
    trainer = L.Trainer(callbacks=[EMAWeightAveraging()], logger=False, accelerator="cpu", default_root_dir=tmp_path)
    module = Perceptron()
    trace = trace_step(module, module.batch(4), rows=ROWS, trainer=trainer)
    assert parameter_bytes(module) <= setup_bytes(trace, "callbacks") < 1.1 * parameter_bytes(module)


def test_validation_in_a_fit_finds_optimizer_state_there_and_no_gradients():
    module = Perceptron()
    trace = trace_step(module, module.batch(4), rows=64, accumulate=1, validates=True)
    assert setup_bytes(trace, "gradients") == 0
    assert setup_bytes(trace, "optimizer state") >= 2 * parameter_bytes(module)
    assert {event.phase for event in trace.events if isinstance(event, Work)} >= {"setup", "batch", "validation"}
    assert not any(isinstance(event, Work) and event.phase == "backward" for event in trace.events)


def test_a_fit_can_trace_its_own_step_and_goes_on_as_it_would_have(tmp_path):
    class Asks(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if asks and batch_idx == 1:
                self.trace = trace_step(pl_module, batch, rows=4, num_micro_batches=2, trainer=trainer)

    class Module(Perceptron):
        def training_step(self, batch, batch_idx):
            assert self.trainer.max_epochs == 1
            return super().training_step((F.dropout(batch[0]), batch[1]), batch_idx)

    def trained():
        torch.manual_seed(1)
        module, callback = Module(), Asks()
        trainer = L.Trainer(
            max_epochs=1,
            logger=False,
            accelerator="cpu",
            callbacks=[callback],
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=tmp_path,
            gradient_clip_val=0.5,
        )
        trainer.fit(module, Loader(Perceptron.batch(8), 3))
        return callback, [parameter.clone() for parameter in module.parameters()]

    asks = False
    _, plain = trained()
    asks = True
    callback, weights = trained()
    assert all(map(torch.equal, weights, plain))
    assert any(isinstance(event, Work) and "clamp" in event.op for event in callback.trace.events)  # it clips


def test_module_batch_and_generators_are_untouched():
    class Module(Perceptron):
        def training_step(self, batch, batch_idx):
            random.random()
            np.random.rand()
            self.net[0].weight.data.mul_(2)
            self.seen = batch_idx
            return super().training_step((F.dropout(batch[0]), batch[1]), batch_idx)

    module, batch = Module(), Perceptron.batch(4)
    handle = module.net.register_forward_hook(lambda *_: None)
    module.net[1].eval()
    weights = {name: (value.data_ptr(), value.clone()) for name, value in module.state_dict(keep_vars=True).items()}
    entries, copies = set(vars(module)), [value.clone() for value in batch]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    threads = torch.get_num_threads()
    trace_step(module, batch, rows=4, num_micro_batches=2)
    assert torch.get_num_threads() == threads
    for name, value in module.state_dict(keep_vars=True).items():
        assert value.data_ptr() == weights[name][0]
        assert torch.equal(value, weights[name][1])
        assert value.grad is None
    assert set(vars(module)) == entries
    assert module._trainer is None
    assert list(module.net._forward_hooks) == [handle.id]
    assert module.training
    assert not module.net[1].training
    assert all(map(torch.equal, batch, copies))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_activation_checkpointing_of_the_module_itself_is_seen(transformed):
    class Module(Transformer):
        def training_step(self, batch, batch_idx):
            x = self.tokens(batch["tokens"])
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())

    saving = trace_step(Module(), Module.batch(4), rows=ROWS)
    assert taken(saving, "activations") < 0.5 * taken(transformed, "activations")
