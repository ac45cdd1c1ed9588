"""A step that failed once leaves no state behind, of any kind.

The same holds for a check, a probe and a dry run.
"""

import copy
import queue

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import RunError, UndoError
from lightning_unified.step.recovery.undone_run import Undone
from lightning_unified.step.results.metrics import metrics_of
from tests.support.lanes import crossed, first_cells
from tests.support.modules.undo import FAULTS, KINDS, SMOOTH, TEXT, Fails, Holds, Plain, Scaling, forget_globals

ROWS = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _clean():
    forget_globals()
    yield
    forget_globals()


def train(make, *, at=(), batch_size=2, callbacks=(), validation=None, data=None, **options):
    """Train six batches; memory runs out in the backward passes numbered `at`."""
    FAULTS.update(at=set(at), calls=0)
    forget_globals()
    torch.manual_seed(0)
    module = make()
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=UnifiedStrategy(**({"predict": False} | options)),
        max_epochs=1,
        callbacks=list(callbacks),
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data or TensorDataset(ROWS, LABELS), batch_size=batch_size), validation)
    return module, trainer


def tensors(module):
    return torch.cat([one.detach().flatten().double() for one in (*module.parameters(), *module.buffers())])


@first_cells(
    10, ("name", "at"), crossed(KINDS, [1, 2, 4], fast=[*((name, 2) for name in KINDS), ("list", 1), ("list", 4)])
)
def test_a_step_that_failed_once_leaves_no_state_behind(name, at):
    whole = {"batch_size": 1}
    undisturbed, _ = train(KINDS[name], **whole)
    failed, trainer = train(KINDS[name], at=[at], **whole)

    assert trainer.strategy.recoveries == 1
    assert torch.equal(tensors(failed), tensors(undisturbed))


@first_cells(10, "name", KINDS)
def test_steps_that_are_tried_leave_no_state_behind(name):
    class Tries(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            with Undone(trainer):
                for _ in range(2):
                    module.training_step(copy.deepcopy(batch), batch_idx).backward()

    undisturbed, _ = train(KINDS[name])
    tried, _ = train(KINDS[name], callbacks=[Tries()])

    assert torch.equal(tensors(tried), tensors(undisturbed))


class Smooths(Plain):
    """Keeps a moving mean of its loss in four places.

    They are an own object, a global, a callback and a default argument.
    """

    def __init__(self):
        super().__init__()
        self.mean = {}

    def training_step(self, batch, batch_idx, memory=[]):  # noqa: B006
        loss = super().training_step(batch, batch_idx)
        self.mean["loss"] = SMOOTH.value = loss.detach()
        for callback in self.trainer.callbacks:
            if isinstance(callback, Remembers):
                callback.loss = loss.detach()
        memory.append(loss.detach())
        return loss


class Remembers(L.Callback):
    loss = None


def test_a_dry_run_leaves_no_fake_tensor_behind():
    class Looks(Remembers):
        def on_train_start(self, trainer, module):
            assert module.mean == {}

        def on_train_batch_end(self, trainer, module, *_):
            found = [module.mean["loss"], SMOOTH.value, self.loss, *Smooths.training_step.__defaults__[0]]
            assert {type(one) for one in found} == {torch.Tensor}

    Smooths.training_step.__defaults__[0].clear()
    _, trainer = train(Smooths, callbacks=[Looks()], predict=True)

    assert len(Smooths.training_step.__defaults__[0]) == 6
    assert trainer.strategy.plan is not None


class Writes(Plain):
    """Writes a tensor in the given steps that is larger than what is copied before every step."""

    def __init__(self, steps, *, seen=False):
        super().__init__()
        self.encoder = {"weight": torch.ones(200, 200)}
        self.steps, self.seen = steps, seen

    def training_step(self, batch, batch_idx):
        if batch_idx in self.steps:
            target = self.encoder["weight"] if self.seen else self.encoder["weight"].data
            target.mul_(0.5)
        return super().training_step(batch, batch_idx) * (1 + self.encoder["weight"].mean())


@pytest.mark.parametrize("seen", [False, True], ids=["through .data", "in place"])
def test_a_large_tensor_first_written_by_a_failed_step_is_refused_by_name(seen):
    with pytest.raises(RunError, match=r"written Writes\.encoder\['weight'\] \(.*\) in place.*Resume from"):
        train(lambda: Writes({4}, seen=seen), at=[5])


@pytest.mark.parametrize(("at", "seen"), crossed([1, 4], [False, True], fast=[(1, True), (4, False)]))
def test_a_large_tensor_that_every_step_writes_is_put_back(at, seen):
    undisturbed, _ = train(lambda: Writes(range(9), seen=seen), batch_size=1)
    failed, trainer = train(lambda: Writes(range(9), seen=seen), at=[at], batch_size=1)

    assert trainer.strategy.recoveries == 1
    assert torch.equal(tensors(failed), tensors(undisturbed))
    assert torch.equal(failed.encoder["weight"], undisturbed.encoder["weight"])


def test_a_container_too_long_to_copy_may_grow_but_not_change_otherwise():
    class Long(Plain):
        def __init__(self, change):
            super().__init__()
            self.ids, self.change = list(range(100_001)), change

        def draw(self):
            self.change(self.ids)
            return len(self.ids) / 100_000

    def grow(ids):
        ids.append(0)

    undisturbed, _ = train(lambda: Long(grow), batch_size=1)
    failed, _ = train(lambda: Long(grow), at=[3], batch_size=1)
    assert torch.equal(tensors(failed), tensors(undisturbed))

    with pytest.raises(RunError, match=r"changed Long\.ids, a list of 100,001 entries"):
        train(lambda: Long(list.pop), at=[1], batch_size=1)


class Graph:
    """A batch that is an object."""

    def __init__(self, rows):
        self.x, self.y = rows

    def to(self, *_, **__):
        return self


def test_what_a_step_set_on_its_batch_is_taken_back():
    class Sets(Plain):
        def training_step(self, batch, batch_idx):
            batch.x = batch.x * 0.5 + 1
            batch.seen = getattr(batch, "seen", 0) + 1
            return super().training_step((batch.x, batch.y), batch_idx) * batch.seen

    class Leaves(Plain):
        def training_step(self, batch, batch_idx):
            assert not batch.x.requires_grad
            assert batch.x.grad is None
            batch.x.requires_grad_()
            torch.nn.functional.cross_entropy(self.net(batch.x), batch.y).backward()
            moved = batch.x.detach() + 0.1 * batch.x.grad.sign()
            return super().training_step((moved, batch.y), batch_idx)

    for kind in (Sets, Leaves):
        weights = []
        for at in ((), (3,)):
            FAULTS.update(at=set(at), calls=0)
            torch.manual_seed(0)
            module = kind()
            batches = [Graph(rows) for rows in zip(ROWS.clone().split(1), LABELS.split(1), strict=True)]
            trainer = L.Trainer(
                accelerator="cpu",
                strategy=UnifiedStrategy(predict=False),
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module, DataLoader(batches, batch_size=None))
            weights.append(tensors(module))
        assert torch.equal(*weights), kind


def test_results_that_a_validation_step_gathers_are_gathered_once():
    class Gathers(Plain):
        def __init__(self):
            super().__init__()
            self.outputs = []

        def validation_step(self, batch, batch_idx):
            self.outputs.append(batch[1])
            if len(batch[1]) > 3:
                raise torch.OutOfMemoryError(TEXT)

        def on_validation_epoch_end(self):
            self.gathered = torch.cat(self.outputs)
            self.outputs.clear()

    loader = DataLoader(TensorDataset(ROWS, LABELS), batch_size=5)
    module, trainer = train(Gathers, validation=loader)

    assert trainer.strategy.recoveries > 0
    assert torch.equal(module.gathered, LABELS)


def test_metrics_are_found_wherever_a_module_holds_them():
    module = KINDS["metrics"]()
    module.late = {"deep": [KINDS["metrics"]().meters]}

    assert (
        len(metrics_of(module)) == 4
    )  # in the dict, in the tracker and the one that it copies, and in the nested dict
    assert module.late["deep"][0]["a"] in metrics_of(module)


def test_a_simple_queue_that_a_failed_step_took_from_is_named():
    def taken(kept):
        if not kept.empty():
            kept.get()
        return 1

    with pytest.raises(UndoError, match=r"had changed Holds\.kept, a queue\.SimpleQueue that entries were taken from"):
        train(lambda: Holds(filled, taken), at=[2], batch_size=1)


def filled():
    kept = queue.SimpleQueue()
    kept.put(1)
    kept.put(2)
    return kept


def is_short():
    return bool(FAULTS["at"])


class InnerBackward(Plain):
    """Runs a backward pass of its own, and drops its gradients or not."""

    def __init__(self, *, zero_grad):
        super().__init__()
        self.drops = zero_grad

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        torch.nn.functional.cross_entropy(self.net(x), batch[1]).backward()
        if self.drops:
            self.zero_grad()
        if len(x) > 2 and is_short():
            raise torch.OutOfMemoryError(TEXT)
        return super().training_step((x.detach() + 0.1 * x.grad.sign(), batch[1]), batch_idx)


@first_cells(1, "zero_grad", [False, True])
def test_a_step_with_a_backward_of_its_own_is_undone_and_split(zero_grad):
    whole, _ = train(lambda: InnerBackward(zero_grad=zero_grad), batch_size=4)
    split, trainer = train(lambda: InnerBackward(zero_grad=zero_grad), batch_size=4, at=[999])

    assert trainer.strategy.recoveries == 1
    torch.testing.assert_close(tensors(split), tensors(whole), rtol=1e-5, atol=1e-6)


def test_the_failing_operation_fails():
    FAULTS.update(at={1}, calls=0)
    with pytest.raises(torch.OutOfMemoryError):
        Fails.apply(torch.ones(1, requires_grad=True)).sum().backward()


def test_what_torchs_compiler_notes_on_parameters_is_no_state_of_the_module():
    class Noted(Plain):
        def training_step(self, *args):
            weight = next(self.parameters())
            for name in ("_dynamo_dynamic_range", "seen"):
                setattr(weight, name, getattr(weight, name, 0) + 1)
            return super().training_step(*args)

    module, trainer = train(Noted, batch_size=4, micro_batch_size=2)
    weight = next(module.parameters())

    assert weight.seen == trainer.global_step
    assert weight._dynamo_dynamic_range > trainer.global_step


def test_a_hook_that_is_registered_between_steps_is_found():
    class Registers(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2:
                module.net[1].register_forward_hook(Scaling())

    results = [train(Plain, callbacks=[Registers()], at=at, batch_size=1)[0] for at in ((), (4,))]

    assert torch.equal(*map(tensors, results))


class Counting(TensorDataset):
    """Counts the rows that a loader takes."""

    served = 0

    def __getitem__(self, index):
        self.served += 1
        return super().__getitem__(index)


def test_what_iteration_changes_in_a_dataset_is_not_undone():
    class Serves(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            dataset = trainer.train_dataloader.dataset
            dataset.level = before = 5
            with Undone(trainer):
                module.training_step(copy.deepcopy(batch), batch_idx)
                _ = dataset[0]
            assert (dataset.level, dataset.served) == (before, len(batch[0]) * (batch_idx + 1) + batch_idx + 1)

    class Levels(Plain):
        def draw(self):
            self.trainer.train_dataloader.dataset.level += 1
            return 1.0

    train(Levels, callbacks=[Serves()], data=Counting(ROWS, LABELS))


@first_cells(1, "name", ["closures of functions", "own forward", "hooks of modules", "data", "optimizer"])
def test_a_split_batch_counts_once(name):
    whole, _ = train(KINDS[name], batch_size=4)
    split, _ = train(KINDS[name], batch_size=4, micro_batch_size=3)

    torch.testing.assert_close(tensors(split), tensors(whole), rtol=1e-5, atol=1e-6)
