"""Contrastive losses, exactly: named encoders run in chunks of rows inside one step on the whole batch."""

import copy
import logging
import pickle
from functools import lru_cache

import lightning as L
import pytest
import torch
from contrastive_modules import (
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
)
from live_bytes import live_peak, peak_of
from modules import fit, weights
from torch import nn

from lightning_unified import MicroBatchRules, UnifiedStrategy
from lightning_unified.errors import ConfigurationError, OutOfMemoryError, SplitError
from lightning_unified.training.encoders.calls import NotRowWiseError, merged
from lightning_unified.training.rehearsal import rehearse

EXACT = {"rtol": 0, "atol": 1e-12}
KINDS = (Contrastive, SimCLR, Clip, Triplet, Supervised, Momentum, Chained, Nested, Texts)
TEXT = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12"


def run(kind, strategy="auto", *callbacks, precision="64-true", **options):
    torch.manual_seed(0)
    module = kind().to(torch.float64 if precision == "64-true" else torch.float32)
    loader = kind.loader(dtype=torch.float64 if precision == "64-true" else torch.float32)
    seen, trainer = fit(module, loader, strategy=strategy, callbacks=callbacks, precision=precision, **options)
    return module, seen, trainer


@lru_cache(maxsize=32)
def plainly(kind, precision="64-true", **options):
    return run(kind, precision=precision, **options)


def is_as_plain(kind, found, *, atol=1e-12, **options):
    module, seen, _ = found
    plain, expected, _ = plainly(kind, **options)
    torch.testing.assert_close(weights(module), weights(plain), rtol=0, atol=atol)
    torch.testing.assert_close(list(module.buffers()), list(plain.buffers()), rtol=0, atol=atol)
    assert len(seen.outputs) == len(expected.outputs)
    for one, other in zip(seen.outputs, expected.outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)
    for one, other in zip(seen.callback_metrics, expected.callback_metrics, strict=True):
        assert one == pytest.approx(other, abs=10 * atol)
    assert seen.after_backward == expected.after_backward


class Fails(L.Callback):
    """Raises an out-of-memory error in the forward or backward pass of one batch, as often as told."""

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


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_weights_logs_and_outputs_are_those_of_plain_lightning(kind, size):
    is_as_plain(kind, run(kind, UnifiedStrategy(micro_batch_size=size)))


@pytest.mark.parametrize("kind", [SimCLR, Clip], ids=lambda kind: kind.__name__)
def test_windows_and_clipping_are_those_of_plain_lightning(kind):
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    is_as_plain(kind, run(kind, UnifiedStrategy(micro_batch_size=3), **options), **options)


@pytest.mark.parametrize("kind", [Contrastive, Clip], ids=lambda kind: kind.__name__)
def test_autocast_is_that_of_plain_lightning_but_for_rounding(kind):
    found = run(kind, UnifiedStrategy(micro_batch_size=3), precision="bf16-mixed")
    is_as_plain(kind, found, atol=2e-2, precision="bf16-mixed")


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_step_out_of_memory_is_repeated_in_smaller_chunks(phase, check):
    times = 1 if check else 2
    found = run(Clip, UnifiedStrategy(check_split=check), Fails(phase, times=times))
    is_as_plain(Clip, found)
    policy = found[2].strategy.policy
    assert policy.recoveries == times
    assert policy.micro_batch_size == 8 // 2**times


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
        self.calls, self.runs = [], []

    def on_fit_start(self):
        self.net.register_forward_hook(lambda _, args, __: self.calls.append(len(args[0])))
        self.net[0].register_forward_hook(lambda _, args, __: self.runs.append((len(args[0]), torch.is_grad_enabled())))


def test_a_call_runs_in_even_chunks_once_forward_and_once_backward():
    module, _, _ = run(
        Counting, UnifiedStrategy(micro_batch_size=3, check_split=False), max_epochs=1, limit_train_batches=1
    )
    assert module.calls == [8, 8]  # hooks of the encoder see whole calls
    assert [rows for rows, _ in module.runs] == [3, 3, 2] * 2 + [2, 3, 3] * 2


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


class Mixing(nn.Module):
    """Takes a share of the mean over the rows run at once."""

    def __init__(self, share=0.01):
        super().__init__()
        self.inner, self.share = nn.Linear(6, 4), share

    def forward(self, x):
        out = self.inner(x)
        return out - self.share * out.mean(0)


class Sorted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 4)

    def forward(self, x):
        return self.inner(x).mean(0, keepdim=True).square()


class Scalar(Sorted):
    def forward(self, x):
        return self.inner(x).square().mean()


class MixedGradient(Sorted):
    """Its outputs are by row; their gradients are not."""

    def forward(self, x):
        out = self.inner(x)
        return out + (out.mean(0) - out.mean(0).detach())


class Counter(Sorted):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


class Remembers(Sorted):
    def forward(self, x):
        self.last = self.inner(x)
        return self.last


class MovingMean(Sorted):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        out = self.inner(x)
        self.mean.lerp_(out.detach().mean(0), 0.1)
        return out - self.mean


class WritesItsInput(Sorted):
    def forward(self, x):
        return self.inner(x.mul_(2))


WRONG = {
    "differ by": Mixing,
    "no first dimension of rows": Sorted,
    "no first dimension": Scalar,
    "gradient of": MixedGradient,
    "attribute 'calls'": Counter,
    "attribute 'last'": Remembers,
    "buffer 'mean'": MovingMean,
    "in place": WritesItsInput,
    "buffer '_u'": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_encoder_that_is_not_row_wise_is_refused_before_an_update(what):
    class Wrong(Contrastive):
        def __init__(self):
            super().__init__()
            self.net = WRONG[what]()

        def loss(self, batch):
            out = self.net(batch["x"])
            return info_nce(out, out.detach()) if out.dim() else out, out.reshape(1, -1)

    torch.manual_seed(0)
    module = Wrong().double()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(SplitError, match="'net'") as refusal:
        fit(module, Wrong.loader(), strategy=UnifiedStrategy(micro_batch_size=3))
    assert what in str(refusal.value)
    torch.testing.assert_close(dict(module.state_dict()), dict(before), rtol=0, atol=0)


def test_batch_norm_inside_an_encoder_is_refused_and_outside_is_exact():
    class Inside(Contrastive):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))

    with pytest.raises(SplitError, match=r"BatchNorm in train mode \(net\.1"):
        run(Inside, UnifiedStrategy(micro_batch_size=3))
    run(Inside, UnifiedStrategy(micro_batch_size=3, batch_norm="micro"))
    is_as_plain(SimCLR, run(SimCLR, UnifiedStrategy(micro_batch_size=3)))


@pytest.mark.parametrize(("name", "near"), [("nte", "'net'"), ("net.33", "'net.3'"), ("", "'net'")])
def test_an_unknown_name_is_refused_with_the_nearest_ones(name, near):
    strategy = UnifiedStrategy(micro_batches=MicroBatchRules(encoders=(name,)))
    with pytest.raises(ConfigurationError, match=near):
        run(Contrastive, strategy)


def test_a_step_that_calls_no_encoder_is_refused():
    class Method(Contrastive):
        encoders = ("other",)

        def __init__(self):
            super().__init__()
            self.other = nn.Linear(2, 2)

    with pytest.raises(SplitError, match="calls none of these submodules"):
        run(Method, UnifiedStrategy(micro_batch_size=3))


class SharedMask(Contrastive):
    """An argument of `positions` rows is shared by all rows of the batch."""

    positions = 4

    def __init__(self):
        super().__init__()
        self.net = Positions(self.positions)

    def loss(self, batch):
        mask = torch.ones(self.positions, self.positions, dtype=batch["x"].dtype).tril()
        embedded = self.net(batch["x"], mask)
        return info_nce(embedded, embedded.detach()), embedded


class Positions(nn.Module):
    def __init__(self, positions):
        super().__init__()
        self.inner, self.positions = nn.Linear(6, positions), positions

    def forward(self, x, mask):
        return (self.inner(x)[:, None] * mask.softmax(-1)).sum(-1)


def test_a_shared_argument_stays_whole_when_a_later_batch_is_as_long():
    is_as_plain(SharedMask, run(SharedMask, UnifiedStrategy(micro_batch_size=3)))  # the last batch has 4 rows


def test_a_shared_argument_as_long_as_the_first_batch_is_refused():
    class Ambiguous(SharedMask):
        positions = 8

    with pytest.raises((SplitError, RuntimeError)) as refusal:
        run(Ambiguous, UnifiedStrategy(micro_batch_size=3))
    assert "net" in str(refusal.value) + "".join(getattr(refusal.value, "__notes__", []))


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
    def loss(self, batch):
        one, other = self.net(batch["x"]), self.net(batch["y"])
        return info_nce(one, other), one

    def __init__(self):
        super().__init__()
        self.net = Jitter()


class Jitter(Sorted):
    def forward(self, x):
        return self.inner(x + torch.randn_like(x))


@pytest.mark.parametrize("kind", [Dropout, Recurrent, Noise], ids=lambda kind: kind.__name__)
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
    def __init__(self):
        self.left, self.rows = 1, []

    def on_validation_start(self, trainer, module):
        self.handle = module.net[0].register_forward_hook(self.fail)

    def on_validation_end(self, trainer, module):
        self.handle.remove()

    def fail(self, _, args, __):
        self.rows.append(len(args[0]))
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


@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
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


class Deep(Contrastive):
    """Activations of 24 layers at 64 positions, and embeddings of 4 entries."""

    def __init__(self):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(24))
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 32, 4))


def deep_batch(rows=64):
    return {"x": torch.randn(rows, 64, 32), "y": torch.randn(rows, 64, 32)}


def test_memory_falls_with_the_chunk(tmp_path):
    peaks = {rows: live_peak(Deep, deep_batch(), parts=64 // rows, rows=rows, folder=tmp_path) for rows in (64, 16, 4)}
    activations = 2 * 64 * 64 * 32 * 4 * 24
    assert peaks[64] > activations
    assert peaks[16] < 0.3 * peaks[64]
    assert peaks[4] < 0.6 * peaks[16]


@pytest.mark.parametrize("parts", [1, 3, 4, 8])
def test_a_dry_run_predicts_the_peak_of_a_step_in_chunks(parts, tmp_path):
    predicted = peak_of(rehearse(Deep(), deep_batch(), rows=-(-64 // parts), parts=parts, later_rows=64 // parts))
    measured = live_peak(Deep, deep_batch(), parts=parts, rows=-(-64 // parts), folder=tmp_path)
    assert predicted == pytest.approx(measured, rel=0.05)


def test_results_of_chunks_merge_only_if_they_are_rows():
    kept = object()
    rows = [torch.zeros(2, 3), torch.ones(1, 3)]
    assert merged([{"a": one, "b": (None, kept, 1)} for one in rows], [2, 1])["a"].shape == (3, 3)
    for parts in ([torch.zeros(()), torch.ones(())], [1, 2], [rows[:1], rows], [torch.zeros(3, 2), torch.zeros(3, 1)]):
        with pytest.raises(NotRowWiseError):
            merged(parts, [2, 1])
