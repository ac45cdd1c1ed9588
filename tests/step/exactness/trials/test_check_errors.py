"""Errors inside a check: out of memory, the user's own, and those of fewer rows.

Errors of the last kind are raised only where fewer rows run.
"""

from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import MicroBatchRules, RowRules, UnifiedStrategy
from lightning_unified.errors import SplitError
from tests.support.lanes import first_cells
from tests.support.modules.plain import MLP, fit, weights
from tests.support.modules.split import Contrastive, Mean, Net, ShiftedTokens, Tokens, found, run

TEXT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


def out_of_memory(kind, *, rows, times=10**6):
    """Return `kind` with memory that runs out above `rows` rows, a given number of times.

    A recovered step never runs out.
    """

    class Tight(kind):
        left = times

        def loss(self, out, batch):
            if len(out) > rows and self.left:
                type(self).left -= 1  # of the class: a check puts back what it changes in the module
                raise RuntimeError(TEXT)
            return super().loss(out, batch)

    return Tight


@first_cells(1, ("rows", "checked"), [(4, 4), (2, 2)])
def test_memory_that_runs_out_in_a_check_makes_it_smaller(rows, checked):
    tight, _, strategy = run(out_of_memory(ShiftedTokens, rows=rows), strategy=UnifiedStrategy(micro_batch_size=2))
    plain, _, _ = run(ShiftedTokens, strategy=UnifiedStrategy(micro_batch_size=2))

    assert strategy.recoveries == 0
    assert found(strategy).startswith(f"scored labels, shifted: gradients of {checked} rows")
    torch.testing.assert_close(weights(tight), weights(plain), rtol=1e-12, atol=1e-14)


def test_memory_for_one_row_only_leaves_the_likeliest_rule_and_says_so(caplog):
    tight, _, strategy = run(out_of_memory(Tokens, rows=1), strategy=UnifiedStrategy(micro_batch_size=1))
    plain, _, _ = run(Tokens, strategy="auto")

    assert strategy.recoveries == 0
    assert found(strategy) == "scored labels, unchecked: memory ran out while it was checked"
    assert len([record for record in caplog.records if "unchecked" in record.message]) == 1
    torch.testing.assert_close(weights(tight), weights(plain), rtol=1e-9, atol=1e-11)


class Blocks(Net):
    """Ten equal blocks, whose activations do not fit into memory."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(10)))

    def training_step(self, batch, batch_idx):
        kept = []

        def keep(tensor):
            kept.append(tensor)
            if len(batch["x"]) > 1 and len(kept) > 32:  # of 38; 19 where blocks are recomputed, 29 with torch 2.11
                raise RuntimeError(TEXT)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return F.cross_entropy(self.net(self.blocks(batch["x"])), batch["y"])


@pytest.mark.slow
def test_a_check_that_does_not_fit_recomputes_activations():
    _, _, strategy = run(Blocks, strategy=UnifiedStrategy(micro_batch_size=1))

    assert found(strategy).startswith("rows: gradients of 2 rows")
    assert not strategy.policy.recomputation.on


def test_a_recovery_checks_before_it_splits():
    with pytest.raises(SplitError, match="Tight cannot be split exactly"):
        run(out_of_memory(Contrastive, rows=4), strategy=UnifiedStrategy())


def test_a_recovery_of_a_sound_module_is_checked_and_goes_on():
    tight, _, strategy = run(out_of_memory(ShiftedTokens, rows=4), strategy=UnifiedStrategy())
    plain, _, _ = run(ShiftedTokens, strategy="auto")

    assert strategy.recoveries == 1
    assert found(strategy).startswith("scored labels, shifted: gradients of 4 rows")
    torch.testing.assert_close(weights(tight), weights(plain), rtol=1e-9, atol=1e-11)


def test_a_batch_above_a_watched_budget_that_cannot_be_split_goes_on_whole():
    class Shrinks(L.Callback):
        """Does what the watch over the budget does when it sees a peak above it."""

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            strategy = trainer.strategy
            if batch_idx == 1 and strategy.sizes.runs_whole and not strategy.events:
                strategy.policy.watch.budget = replace(strategy.budget, bytes=1)
                strategy.policy.batch_done(None)

    _, whole, _ = run(Contrastive, strategy="auto")
    _, seen, strategy = run(Contrastive, strategy=UnifiedStrategy(), callbacks=[Shrinks()])

    assert any("goes on with them whole" in event for event in strategy.events)
    assert torch.equal(torch.stack(seen.gradients), torch.stack(whole.gradients))


class OwnError(ValueError):
    pass


@pytest.mark.parametrize("size", [3, 5])
def test_a_users_own_error_comes_through_untouched(size):
    class Fails(Mean):
        def loss(self, out, batch):
            raise OwnError("of the user's own")

    with pytest.raises(OwnError, match=r"^of the user's own$") as error:
        run(Fails, strategy=UnifiedStrategy(micro_batch_size=size))

    assert error.value.__cause__ is None


def test_a_users_own_error_comes_through_where_only_some_rows_are_checked():
    class Fails(Mean):
        loader = staticmethod(lambda seed=0, dtype=torch.float64: MLP.loader(rows=40, batch_size=20))

        def loss(self, out, batch):
            raise OwnError("of the user's own")

    with pytest.raises(OwnError, match=r"^of the user's own$"):
        run(Fails, strategy=UnifiedStrategy(micro_batch_size=3))


def test_an_error_in_a_later_batch_comes_through_untouched():
    class Fails(Mean):
        def loss(self, out, batch):
            if self.global_step == 1:
                raise OwnError("of the user's own")
            return super().loss(out, batch)

    with pytest.raises(OwnError, match=r"^of the user's own$"):
        run(Fails)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, AssertionError, OwnError])
def test_an_error_on_fewer_rows_is_a_refusal_that_names_it(error):
    class Whole(Mean):
        def loss(self, out, batch):
            if len(out) != 8:
                raise error("asks for eight rows")
            return super().loss(out, batch)

    message = (
        rf"^Whole.training_step fails on \d of 8 rows of its batch \({error.__name__}: asks for eight rows\).*unit=n"
    )
    with pytest.raises(SplitError, match=message) as refusal:
        run(Whole)

    assert isinstance(refusal.value.__cause__, error)


def test_an_error_on_the_rows_that_are_checked_whole_is_a_refusal_too():
    class Whole(Mean):
        loader = staticmethod(lambda seed=0, dtype=torch.float64: MLP.loader(rows=40, batch_size=20))

        def loss(self, out, batch):
            assert len(out) == 20, "asks for twenty rows"
            return super().loss(out, batch)

    with pytest.raises(SplitError, match=r"Whole.training_step fails on 8 rows of its batch \(AssertionError"):
        run(Whole, strategy=UnifiedStrategy(micro_batch_size=3, predict=False))


class NeedsAutocast(Mean):
    """Its input must have 16 bits, as autocast makes it."""

    def loss(self, out, batch):
        assert out.dtype == torch.bfloat16, "asks for autocast"
        return super().loss(out, batch)


def test_a_module_that_needs_autocast_is_checked_with_it():
    _, _, strategy = run(NeedsAutocast, precision="bf16-mixed")

    assert found(strategy).startswith("rows: gradients of ")


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_loss_of_none_for_a_whole_batch_is_no_error():
    class Skips(Mean):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if self.current_epoch or batch_idx else None

    results = []
    for strategy in ("auto", UnifiedStrategy(micro_batch_size=3)):
        torch.manual_seed(0)
        module = Skips().double()
        trainer = L.Trainer(
            accelerator="cpu",
            strategy=strategy,
            precision="64-true",
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, Skips.loader())
        results.append(weights(module))

    assert found(strategy).startswith("rows: gradients of ")
    assert not [event for event in strategy.events if "no rule merges" in event]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


class Spread(Net):
    """Takes a standard deviation of the rows, which one row has not."""

    def loss(self, out, batch):
        return super().loss(out, batch) + out.std(0).mean()


def test_a_refusal_names_the_micro_batch_whose_gradient_is_not_finite():
    with pytest.raises(SplitError, match=r"rows: not finite.*A micro-batch of 1 row has a gradient that is not finite"):
        run(Spread, strategy=UnifiedStrategy(micro_batch_size=1))


class ByFrequency(Net):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 4, scale_grad_by_freq=True)

    def loss(self, out, batch):
        return super().loss(out + self.embed(torch.arange(len(out))), batch)


def test_an_embedding_that_counts_ids_of_the_rows_is_refused_by_name():
    with pytest.raises(SplitError, match=r"ByFrequency\.embed has scale_grad_by_freq=True"):
        run(ByFrequency)

    run(ByFrequency, strategy=UnifiedStrategy(micro_batch_size=3, check_split=False))


class OfPatches(L.LightningModule):
    """Images whose patches lie one after another in one tensor, as vision-language models take them."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        assert len(batch["patches"]) == 4 * len(batch["y"])
        return F.cross_entropy(self.net(batch["patches"]).view(-1, 4, 2).mean(1), batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    @staticmethod
    def loader():
        generator = torch.Generator().manual_seed(1)
        rows = [(torch.randn(4, 3, generator=generator), index % 2) for index in range(8)]
        return DataLoader(rows, batch_size=8, collate_fn=OfPatches.collate)

    @staticmethod
    def collate(rows):
        labels = torch.tensor([y for _, y in rows])
        return {"patches": torch.cat([x for x, _ in rows]), "y": labels}

    @staticmethod
    def rows(batch, start, stop):
        return {name: one[start * len(one) // 8 : stop * len(one) // 8] for name, one in batch.items()}


def test_a_field_that_every_micro_batch_gets_whole_is_named_where_rows_fail():
    with pytest.raises(SplitError, match=r"'patches' whole: .*RowRules\(split=…\)"):
        fit(OfPatches(), OfPatches.loader(), strategy=UnifiedStrategy(micro_batch_size=2))


def test_a_split_of_patches_trains_as_with_whole_batches():
    trained = []
    for strategy in (
        "auto",
        UnifiedStrategy(
            micro_batch_size=2,
            micro_batches=MicroBatchRules(rows=RowRules(split=OfPatches.rows, count=lambda batch: len(batch["y"]))),
        ),
    ):
        torch.manual_seed(0)
        module = OfPatches()
        fit(module, module.loader(), strategy=strategy)
        trained.append(weights(module))
    torch.testing.assert_close(*trained)
