"""A dry run answers reads of tensor values, and refuses steps that need unknown ones."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_unified.errors import DryRunError
from lightning_unified.planner.dry_run import DryRun
from lightning_unified.planner.fake import awaited, known_values
from tests.support.runs.live_bytes import peak_of
from tests.support.zoo.dry_run import Perceptron, trace_step


class Reader(Perceptron):
    """Reads what its subclasses say."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(self.read(x, y)), y)


def test_a_read_of_the_batchs_whole_numbers_is_answered_by_them():
    class Module(Reader):
        def read(self, x, y):
            assert int(y.max()) == 7
            return x[: (y == 7).nonzero().shape[0] + len(y) - 1]

    batch = torch.randn(4, 64), torch.tensor([1, 7, 3, 2])
    assert trace_step(Module(), batch, rows=4).confidence == "high"


def test_a_read_that_decides_nothing_is_of_medium_confidence():
    class Module(Reader):
        def read(self, x, y):
            correct = (x > 0).sum().item()
            return x * 2 if x.mean() > correct else x

    trace = trace_step(Module(), Module.batch(4), rows=4)
    assert trace.confidence == "medium"
    assert {read.answer for read in trace.reads} == {"1", "False"}


def test_a_read_that_decides_a_shape_is_of_low_confidence():
    class Module(Reader):
        def read(self, x, y):
            chosen = (x[:, 0] > 0).nonzero()
            return x + chosen.float().mean()

    trace = trace_step(Module(), Module.batch(4), rows=64)
    assert trace.confidence == "low"


def test_a_tensor_is_made_of_the_tensors_in_a_list():
    """Lightning's `grad_norm` makes one of the norms of all gradients."""

    class Module(Reader):
        def read(self, x, y):
            norms = torch.tensor([[x[0].norm(), 1.0], [x[1].norm(), 2.0]])
            counts = torch.as_tensor([y.max(), y.min()])
            assert (norms.shape, norms.dtype, counts.dtype) == ((2, 2), x.dtype, y.dtype)
            return x * norms.sum() + counts.sum()

    assert trace_step(Module(), Module.batch(4), rows=4).confidence != "low"


def of_a_distribution(x, _):
    return torch.distributions.Normal(x, x.exp(), validate_args=True).rsample()


def checked_twice(x, _):
    if torch.isnan(x).any() or not torch.isfinite(x.mean()):
        raise ValueError("not finite")
    assert torch.allclose(x, x) and (x < 100).all()
    return x


def is_finite(x):
    return bool(torch.isfinite(x).all())


def are_finite(*given):
    return is_finite(torch.cat(given))


def checked_by_functions(x, _):
    if not is_finite(x):
        raise ValueError("not finite")
    if not are_finite(x, x.exp()):
        raise ValueError("not finite either")
    return x


@pytest.fixture
def runs(monkeypatch):
    """The sizes that dry runs traced, each from the beginning."""
    first, found = DryRun._first, []
    monkeypatch.setattr(known_values, "_VALIDATED", set())
    for places in ("_AWAITED", "_SUSPECTS", "_NEVER"):
        monkeypatch.setattr(awaited, places, set())
    monkeypatch.setattr(DryRun, "_first", lambda self, size, **other: found.append(size) or first(self, size, **other))
    return found


@pytest.mark.parametrize("read", [of_a_distribution, checked_twice, checked_by_functions])
def test_a_step_that_checks_its_values_passes_the_checks(read, runs):
    class Module(Reader):
        def read(self, x, y):
            return read(x, y)

    trace = trace_step(Module(), Module.batch(4), rows=4)
    checks = len(runs) - 1
    again = trace_step(Module(), Module.batch(4), rows=4)

    assert trace.confidence == again.confidence == "medium"
    assert "True" in {one.answer for one in trace.reads}
    assert checks > 0 and len(runs) == checks + 2


def test_an_error_beside_a_read_is_the_modules_own(runs):
    class Module(Reader):
        def read(self, x, y):
            self.is_large(x)
            raise ValueError("of its own")

        @staticmethod
        def is_large(x):
            return bool(x.mean() > 1)

    with pytest.raises(DryRunError, match="of its own"):
        trace_step(Module(), Module.batch(4), rows=4)
    assert len(runs) == 1


def test_what_cannot_be_run_without_values_says_so():
    class Module(Reader):
        def read(self, x, y):
            return torch.from_numpy(np.linalg.svd(x.numpy())[0]) @ x.data_ptr()

    with pytest.raises(DryRunError, match="Module cannot be run without values"):
        trace_step(Module(), Module.batch(4), rows=4)


def test_an_operation_that_fails_prints_no_trace_beside_the_error(caplog):
    class Module(Reader):
        def read(self, x, y):
            return torch.dot(x[0], x[0].double())

    with pytest.raises(DryRunError, match="same dtype"):
        trace_step(Module(), Module.batch(4), rows=4)
    assert not [one for one in caplog.records if one.name.startswith("torch")]


def test_lazy_layers_are_refused():
    class Module(Reader):
        def __init__(self):
            super().__init__()
            self.lazy = nn.LazyLinear(3)

    with pytest.raises(DryRunError, match="lazy layer"):
        trace_step(Module(), Module.batch(4), rows=4)


def test_a_loop_that_waits_for_true_ends(runs):
    """Adaptive solvers repeat a step until its error is small enough, and read other values beside it."""

    class Module(Reader):
        def read(self, x, y):
            while True:
                scaled = x * 2
                accepts = scaled.norm() < self.net[0].weight.norm()
                if scaled.norm() > self.net[0].weight.norm():
                    accepts = False
                if accepts or scaled.norm() == 0:
                    return scaled

    class Once(Reader):
        def read(self, x, y):
            scaled = x * 2
            if not scaled.norm() > 0:
                raise ValueError("zero")
            return scaled

    trace = trace_step(Module(), Module.batch(4), rows=4)
    assert trace.confidence == "low"
    assert {read.answer for read in trace.reads} == {awaited.AWAITED}
    assert peak_of(trace) == pytest.approx(peak_of(trace_step(Once(), Once.batch(4), rows=4)), abs=64)


def test_a_loop_whose_iterations_keep_memory_runs_to_its_end():
    class Module(Reader):
        def read(self, x, y):
            x = x.clone().requires_grad_()
            for _ in range(600):
                x = torch.sin(x)
                if x.norm() < 0.1:
                    break
            return x

    trace = trace_step(Module(), Module.batch(4), rows=4)
    assert {read.answer for read in trace.reads} == {"False"}
    assert len(trace.reads) == 600


def test_a_check_that_is_made_very_often_is_still_passed(runs):
    class Module(Reader):
        def read(self, x, y):
            for _ in range(600):
                if x.isnan().any():
                    raise ValueError("not a number")
            return x

    trace_step(Module(), Module.batch(4), rows=4)


@pytest.mark.parametrize("concentration", ["Dirichlet", "Beta"])
def test_draws_without_a_fake_kernel_are_traced(concentration):
    class Module(Reader):
        def read(self, x, y):
            alpha = F.softplus(x) + 1
            if concentration == "Beta":
                return torch.distributions.Beta(alpha, alpha).rsample()
            return torch.distributions.Dirichlet(alpha).rsample()

    module, batch = Module(), Module.batch(4)
    before = torch.get_rng_state()
    assert trace_step(module, batch, rows=4).confidence != "low"
    assert torch.equal(torch.get_rng_state(), before)
