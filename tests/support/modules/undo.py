"""Modules whose training_step keeps state of every kind.

Each scales its loss by `draw`, which reads the state and advances it.
"""

import collections
import copy
import functools
import itertools
import queue
import random
from dataclasses import dataclass
from types import SimpleNamespace

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricTracker

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."
FAULTS = {"at": set(), "calls": 0}  # no step names it, so it is not put back


class Fails(torch.autograd.Function):
    """Runs out of memory in the backward passes that `FAULTS` numbers."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        FAULTS["calls"] += 1
        if FAULTS["calls"] in FAULTS["at"]:
            raise torch.OutOfMemoryError(TEXT)
        return gradient


class Plain(L.LightningModule):
    """A small classifier without state."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def draw(self):
        return 1.0

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(Fails.apply(self.net(x)), y) * (0.5 + self.draw())

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.1)


class Holds(Plain):
    """Keeps `make()` in its attribute `kept`, and advances it with `move(kept)`."""

    def __init__(self, make, move):
        super().__init__()
        self.kept, self.move = make(), move

    def draw(self):
        return float(self.move(self.kept))


class Counts(Plain):
    """Counts in an attribute, and in another attribute that the first step creates."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def draw(self):
        self.count += 1
        self.late = getattr(self, "late", 0) + 1
        return 1 / (self.count + self.late)


class CountsInSubmodule(Plain):
    """Counts in a submodule."""

    def draw(self):
        self.net[1].count = getattr(self.net[1], "count", 0) + 1
        return 1 / self.net[1].count


class Recurs(Plain):
    """Carries a hidden state over, in a tuple and in a dict that each step creates again."""

    def __init__(self):
        super().__init__()
        self.hidden = (torch.zeros(2), {"cell": torch.ones(2)})

    def draw(self):
        first, rest = self.hidden
        rest["cell"].mul_(0.9)
        self.hidden = (first + rest["cell"], {"cell": rest["cell"] + 0.1})
        return float(first.mean())


class Frozen(Plain):
    """Writes a parameter without gradient, a buffer and a plain tensor.

    Two of the writes bypass version counters.
    """

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("center", torch.zeros(3))
        self.plain = torch.zeros(3)

    def draw(self):
        for mine, other in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.data.mul_(0.9).add_(other.data, alpha=0.1)
        self.center.add_(0.1)
        self.plain.data.add_(0.1)
        return float(self.center.sum() + self.plain.sum() + self.teacher[0].weight.sum())


class Metered(Plain):
    """Holds metrics in a dict, in a list, in a tracker, and makes one in its second step."""

    def __init__(self):
        super().__init__()
        self.meters, self.made = {"a": MeanMetric()}, []
        self.tracker = MetricTracker(MeanMetric(), maximize=False)
        self.tracker.increment()

    def draw(self):
        if self.global_step == 1 and not self.made:
            self.made.append(MeanMetric())
        for number, meter in enumerate([*self.meters.values(), *self.made, self.tracker]):
            meter.update(1.0 + number + self.global_step)
        return float(sum(meter.compute() for meter in self.meters.values()) + self.tracker.compute())


class Schedules(Plain):
    """Sets learning rates before the closure, and counts, in `optimizer_step`.

    A hook of the backward pass updates an EMA.
    """

    def __init__(self):
        super().__init__()
        self.steps, self.ema = 0, torch.zeros(3, 8)

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        self.steps += 1
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def on_before_zero_grad(self, optimizer):
        self.ema.mul_(0.5).add_(self.net[2].weight.detach())

    def draw(self):
        return float(self.ema.sum())


GLOBAL_COUNT, GLOBAL_LIST, GLOBAL_RNG = 0, [], random.Random(0)
SMOOTH = SimpleNamespace(value=None)


class NamesGlobals(Plain):
    """Rebinds a global, and changes objects that globals name."""

    def training_step(self, batch, batch_idx):
        global GLOBAL_COUNT  # noqa: PLW0603
        GLOBAL_COUNT += 1
        GLOBAL_LIST.append(GLOBAL_COUNT)
        SMOOTH.value = GLOBAL_COUNT if SMOOTH.value is None else 0.5 * (SMOOTH.value + GLOBAL_COUNT)
        return super().training_step(batch, batch_idx) * (len(GLOBAL_LIST) + GLOBAL_RNG.random() + SMOOTH.value)


REACHED = {"method": 0, "submodule": 0}


class CountsInForward(nn.Module):
    """Changes a global in a method that its forward calls."""

    def forward(self):
        return self.counted

    @property
    def counted(self):
        REACHED["submodule"] += 1
        return REACHED["submodule"]


class ReachesGlobals(Plain):
    """Changes globals in a helper method and in a submodule's forward."""

    def __init__(self):
        super().__init__()
        self.counts = CountsInForward()

    def draw(self):
        return self.helper() / (self.counts() + 1)

    def helper(self):
        REACHED["method"] += 1
        return REACHED["method"]


class Registry:
    """Counts in class attributes, and creates one."""

    count, seen = 0, []

    @classmethod
    def add(cls):
        cls.count += 1
        cls.late = getattr(cls, "late", 0) + 1
        cls.seen.append(cls.count)
        return cls.late + sum(cls.seen)


class WritesClasses(Registry, Plain):
    """Changes attributes of its class and of a base of it."""

    steps = 0

    def draw(self):
        type(self).steps += 1
        return 1 / (self.steps + Registry.add())


class WritesTrainer(Plain):
    """Counts in an attribute of the Trainer, which the first step creates."""

    def draw(self):
        self.trainer.count = getattr(self.trainer, "count", 0) + 1
        return 1 / self.trainer.count


class MarksParameters(Plain):
    """Keeps a number and a list as attributes of a trained parameter."""

    def draw(self):
        weight = self.net[0].weight
        weight.count = getattr(weight, "count", 0) + 1
        return 1 / weight.count


def closes_over():
    """Return a module whose step rebinds a variable of this function.

    The step also changes an object that another variable holds.
    """
    count, seen = 0, {"sum": 0}

    class ClosesOver(Plain):
        def training_step(self, batch, batch_idx):
            nonlocal count
            count += 1
            seen["sum"] += count
            return super().training_step(batch, batch_idx) * (count + seen["sum"])

    return ClosesOver()


def counter():
    """Return a function that counts its calls in a closure variable."""
    count = 0

    def advance(*_):
        nonlocal count
        count += 1
        return count

    return advance


NAMED = counter()


class CallsFunctions(Plain):
    """Calls functions with closure variables: a global, and one of a plain object in a list."""

    def __init__(self):
        super().__init__()
        self.held = [SimpleNamespace(advance=counter())]

    def draw(self):
        return 1 / (NAMED() + self.held[0].advance())


class CallsOwnForward(Plain):
    """Replaces a submodule's `forward`, and counts in an attribute of a function."""

    def __init__(self):
        super().__init__()
        forward, advance = self.net[0].forward, counter()
        self.net[0].forward = lambda x: forward(x) * (1 + 1 / advance())

        def counts():
            counts.calls = getattr(counts, "calls", 0) + 1
            return counts.calls

        self.counts = counts

    def draw(self):
        return 1 / self.counts()


class CountsInClass:
    """Counts in an attribute of its class."""

    count = 0

    def advance(self, *_):
        type(self).count += 1
        return type(self).count


class Hooked(Plain):
    """Counts in forward hooks: in a closure, a callable object, a bound method and a partial."""

    def __init__(self):
        super().__init__()
        self.net[0].register_forward_pre_hook(scaling(counter()))
        self.net[0].register_forward_hook(Scaling())
        self.net[1].register_forward_hook(Scaling().scaled)
        self.net[2].register_forward_hook(functools.partial(Scaling.scaled, Scaling()))


class Curriculum(L.LightningDataModule):
    """Counts in methods that a step calls, in an attribute and in a dict."""

    def __init__(self):
        super().__init__()
        self.level, self.seen = 0, {"steps": 0}

    def advance(self):
        self.level += 1
        return self.level + self.remembered()

    def remembered(self):
        self.seen["steps"] += 1
        return self.seen["steps"]


class CountsInData(Plain):
    """Counts in two data modules, and in the dataset and sampler of the training loader."""

    def __init__(self):
        super().__init__()
        self.own = Curriculum()

    def on_train_start(self):
        self.trainer.datamodule = Curriculum()

    def draw(self):
        loader = self.trainer.train_dataloader
        for data in (loader.dataset, loader.sampler):
            data.count = getattr(data, "count", 0) + 1
        return 1 / (
            self.own.advance() + self.trainer.datamodule.advance() + loader.dataset.count + loader.sampler.count
        )


class WritesOptimizer(Plain):
    """Counts in an optimizer and its state, halves momentum, and lowers the learning rate."""

    def draw(self):
        optimizer = self.trainer.optimizers[0]
        optimizer.count = getattr(optimizer, "count", 0) + 1
        optimizer.param_groups[0]["lr"] *= 0.9
        for state in optimizer.state.values():
            state["momentum_buffer"].mul_(0.5)
        own = optimizer.state[self.net[0].weight]
        own["count"] = own.get("count", 0) + 1
        return 1 / (optimizer.count + own["count"])

    def configure_optimizers(self):
        return HalvedMomentum(self.net.parameters(), 0.1, momentum=0.9)


class HalvedMomentum(torch.optim.SGD):
    """Has a momentum from the beginning."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)


def scaling(advance):
    """Return a hook that scales its layer's input."""
    return lambda _layer, inputs: (inputs[0] * (1 + 1 / advance()),)


class Scaling:
    """A hook that scales its layer's output, less each time."""

    def __init__(self):
        self.count = 0

    def __call__(self, layer, inputs, output):
        return self.scaled(layer, inputs, output)

    def scaled(self, _layer, _inputs, output):
        self.count += 1
        return output * (1 + 1 / self.count)


@dataclass
class Record:
    """A user's own object, with another one inside."""

    count: int = 0
    inner: SimpleNamespace | None = None


class Scripted(nn.Module):
    """Changes state of every kind that TorchScript has."""

    count: int
    seen: list[int]
    totals: dict[str, int]

    def __init__(self):
        super().__init__()
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("written", torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.norm = nn.BatchNorm1d(2)
        self.count, self.seen, self.totals = 0, [0], {"sum": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen.append(self.count)
        self.totals["sum"] += self.count
        self.replaced = self.replaced + 0.1
        self.written.add_(0.1)
        self.frozen.add_(0.1)
        numbers = self.count + len(self.seen) + self.totals["sum"]
        return (
            numbers
            + (self.replaced + self.written + self.frozen).sum()
            + self.norm(x).detach().sum()
            + self.norm.running_mean[0]
        )


class Slotted:
    """A user's object without a dict."""

    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

    def advance(self):
        self.count += 1
        return self.count


def _moves_record(record):
    record.count += 1
    record.inner.count += record.count
    return record.inner.count


def _moves_slots(slotted):
    slotted.count += 1
    return slotted.count


def _moves_ordered(ordered):
    ordered.move_to_end(next(iter(ordered)))
    return next(iter(ordered.values()))


def _moves_nested(nested):
    nested["a"][-1].append(len(nested["a"]))
    nested["a"].append([1])
    return len(nested["a"]) + len(nested["a"][-2])


def _moves_array(array):
    array += 1
    return array.sum()


HELD = {
    "list": (list, lambda kept: kept.append(len(kept)) or sum(kept)),
    "nested containers": (lambda: {"a": [[]]}, _moves_nested),
    "set": (lambda: {0}, lambda kept: kept.add(len(kept)) or len(kept)),
    "deque": (lambda: collections.deque([1, 2, 3], maxlen=3), lambda kept: kept.append(sum(kept)) or kept[0]),
    "ordered dict": (lambda: collections.OrderedDict(a=1, b=2, c=3), _moves_ordered),
    "default dict": (lambda: collections.defaultdict(int), lambda kept: kept.update(a=kept["a"] + 1) or kept["a"]),
    "counter": (collections.Counter, lambda kept: kept.update("a") or kept["a"]),
    "queue": (queue.Queue, lambda kept: kept.put(1) or kept.qsize() + kept.unfinished_tasks),
    "priority queue": (queue.PriorityQueue, lambda kept: kept.put(kept.qsize()) or kept.qsize()),
    "simple queue": (queue.SimpleQueue, lambda kept: kept.put(1) or kept.qsize()),
    "partial": (lambda: functools.partial(list.append, [0]), lambda kept: kept(1) or len(kept.args[0])),
    "keywords of a partial": (
        lambda: functools.partial(dict, seen=[0]),
        lambda kept: kept()["seen"].append(1) or len(kept()["seen"]),
    ),
    "bytearray": (lambda: bytearray(b"a"), lambda kept: kept.append(len(kept)) or len(kept)),
    "array": (lambda: np.zeros(3), _moves_array),
    "large array": (lambda: np.zeros(20_000), _moves_array),
    "random.Random": (lambda: random.Random(0), lambda kept: kept.gauss(0, 1)),
    "numpy generator": (lambda: np.random.default_rng(0), lambda kept: kept.random()),
    "numpy random state": (lambda: np.random.RandomState(0), lambda kept: kept.rand()),
    "torch generator": (lambda: torch.Generator().manual_seed(0), lambda kept: torch.rand((), generator=kept)),
    "itertools.count": (itertools.count, next),
    "itertools.cycle": (lambda: itertools.cycle([1, 2, 3]), next),
    "list iterator": (lambda: iter(list(range(99))), next),
    "own object": (lambda: Record(inner=SimpleNamespace(count=0)), _moves_record),
    "object with slots": (Slotted, _moves_slots),
    "bound method": (lambda: Slotted().advance, lambda kept: kept()),
    "attribute of a plain object's class": (CountsInClass, CountsInClass.advance),
    "TorchScript module": (
        lambda: torch.jit.script(Scripted()),
        lambda kept: kept(torch.ones(2, 2)),
    ),
    "traced module": (
        lambda: torch.jit.trace(nn.BatchNorm1d(2), torch.ones(2, 2)),
        lambda kept: kept(torch.ones(2, 2)).detach().sum() + kept.running_mean.sum(),
    ),
    "module in a list": (
        lambda: [nn.BatchNorm1d(2)],
        lambda kept: kept[0](torch.ones(2, 2)).sum() + kept[0].running_mean.sum(),
    ),
}
KINDS = {
    **{name: lambda pair=pair: Holds(*pair) for name, pair in HELD.items()},
    "counter attributes": Counts,
    "attribute of a submodule": CountsInSubmodule,
    "hidden state": Recurs,
    "frozen tensors": Frozen,
    "metrics": Metered,
    "optimizer_step and hooks": Schedules,
    "globals": NamesGlobals,
    "reached globals": ReachesGlobals,
    "class attributes": WritesClasses,
    "attributes of the Trainer": WritesTrainer,
    "attributes of parameters": MarksParameters,
    "closure variables": closes_over,
    "closures of functions": CallsFunctions,
    "own forward": CallsOwnForward,
    "hooks of modules": Hooked,
    "data": CountsInData,
    "optimizer": WritesOptimizer,
}


def forget_globals():
    """Reset the globals and class attributes that the modules change."""
    globals().update(GLOBAL_COUNT=0)
    REACHED.update(method=0, submodule=0)
    WritesClasses.steps, Registry.count, Registry.seen = 0, 0, []
    NAMED.__closure__[0].cell_contents, CountsInClass.count = 0, 0
    if "late" in vars(Registry):
        del Registry.late
    GLOBAL_LIST.clear()
    GLOBAL_RNG.seed(0)
    SMOOTH.value = None
