"""`UnifiedStrategy(recompute=…)` on any module: same weights, less memory.

Weights agree bit for bit, and the end of the fit undoes everything.
"""

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy
from lightning_unified.errors import ConfigurationError, OutOfMemoryError, SplitError
from lightning_unified.nn.recomputing import RecomputePolicy

TEXT = (
    "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Replace the collection of a whole session's garbage after each error: it is slow."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.4)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return x + self.drop(self.norm(self.linear(x)).relu())


class Deep(L.LightningModule):
    """A module without code for recomputation.

    Memory holds `room` rows with kept activations, and three times as many without.
    """

    def __init__(self, room=None, norm=True):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 1)
        self.room = room
        if not norm:
            for layer in self.layers:
                layer.norm = nn.LayerNorm(6)

    @property
    def recomputes(self):
        return "forward" in vars(self.layers[0])

    def training_step(self, batch, batch_idx):
        x = batch
        for layer in self.layers:
            x = layer(x)
        if self.training and self.room is not None and len(batch) > self.room * (3 if self.recomputes else 1):
            raise RuntimeError(TEXT)
        loss = self.head(x).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.05)


class Pairs(Deep):
    """Every row is compared with every other one, and it says so nowhere."""

    def __init__(self, room=None):
        super().__init__(room, norm=False)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + nn.functional.cross_entropy(self.head(batch) @ self.head(batch).T, torch.arange(len(batch)))


class Switch(Deep):
    recompute = False

    @property
    def recomputes(self):
        return self.recompute


def fit(module, strategy, *, rows=8, batches=3, callbacks=(), **options):
    torch.manual_seed(2)
    data = torch.randn(rows * batches, 6)
    defaults = {"enable_checkpointing": False, "max_epochs": 1}
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **options},
    )
    trainer.fit(module, DataLoader(data, rows))
    return trainer


def trained(kind=Deep, *args, recompute, strategy=None, **options):
    torch.manual_seed(1)
    module = kind(*args)
    trainer = fit(module, UnifiedStrategy(recompute=recompute, **(strategy or {})), **options)
    return module, [*module.state_dict().values(), torch.get_rng_state()], trainer


def assert_equal(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ({}, {}),
        ({}, {"precision": "bf16-mixed"}),
        ({}, {"accumulate_grad_batches": 2}),
        ({"micro_batch_size": 3, "batch_norm": "micro"}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    ],
    ids=["plain", "bf16-mixed", "window", "micro-batches in a window"],
)
def test_weights_statistics_and_generators_equal_those_without_it_bit_for_bit(strategy, options):
    _, plain, _ = trained(recompute=False, strategy=strategy, **options)
    module, again, trainer = trained(recompute=True, strategy=strategy, **options)

    assert_equal(plain, again)
    assert module.layers[0].norm.num_batches_tracked == (9 if strategy else 3)
    assert trainer.strategy.plan.recompute is True


def test_blocks_run_twice_while_it_lasts_and_the_plan_names_them():
    module, _, trainer = trained(recompute=True)

    assert [layer.runs for layer in module.layers] == [6, 6, 6]
    assert trainer.strategy.plan.reasons["recompute"] == "as asked: 3 blocks of layers (Block), detected"


def test_it_is_undone_when_the_fit_ends():
    module, _, _ = trained(recompute=True)

    assert not any("forward" in vars(child) for child in module.modules())


def test_it_is_undone_when_the_fit_fails():
    class Fails(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            assert module.recomputes
            raise KeyError("on purpose")

    module = Deep()
    with pytest.raises(KeyError, match="on purpose"):
        fit(module, UnifiedStrategy(recompute=True), callbacks=[Fails()])

    assert not module.recomputes


def test_checkpoints_have_the_same_keys_and_a_run_resumes_from_one(tmp_path):
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    _, whole, _ = trained(recompute=True, callbacks=[Saves()])
    saved = torch.load(tmp_path / "2.ckpt", weights_only=False)
    module = Deep()
    fit(module, UnifiedStrategy(recompute=True), max_epochs=2)

    assert list(saved["state_dict"]) == list(Deep().state_dict())
    assert_equal(list(saved["state_dict"].values()), whole[:-1])


def test_a_module_without_blocks_is_refused_with_the_ways_out():
    text = r"recompute=True: BoringModel has no ModuleList .* recompute_blocks = .* has a `recompute` attribute"
    with pytest.raises(ConfigurationError, match=text):
        fit(BoringModel(), UnifiedStrategy(recompute=True))


def test_a_declaration_is_followed():
    class Declares(Deep):
        def recompute_blocks(self):
            return list(self.layers[1:])

    module, _, trainer = trained(Declares, recompute=True)

    assert [layer.runs for layer in module.layers] == [3, 6, 6]
    assert "2 blocks of layers (Block), declared" in trainer.strategy.plan.reasons["recompute"]


def test_the_modules_own_switch_is_set_and_nothing_else():
    module, _, trainer = trained(Switch, recompute=True)

    assert module.recompute is True
    assert [layer.runs for layer in module.layers] == [3, 3, 3]
    assert trainer.strategy.plan.reasons["recompute"] == "as asked, by Switch.recompute"


def test_blocks_that_checkpoint_themselves_are_left_alone_and_that_is_said():
    class Checkpoints(Deep):
        gradient_checkpointing = True

    module, _, trainer = trained(Checkpoints, recompute=True)

    assert module.layers[0].runs == 3
    assert "3 of them the module recomputes itself" in trainer.strategy.plan.reasons["recompute"]


def test_false_leaves_a_module_without_a_switch_as_it_is():
    module, _, trainer = trained(recompute=False)

    assert module.layers[0].runs == 3
    assert trainer.strategy.plan.recompute is False


def test_validation_alone_needs_no_blocks():
    trainer = L.Trainer(
        accelerator="cpu", strategy=UnifiedStrategy(recompute=True), logger=False, enable_progress_bar=False
    )
    trainer.validate(BoringModel(), verbose=False)

    assert trainer.state.finished


def test_when_one_row_does_not_fit_recomputation_is_turned_on_and_the_step_repeated():
    _, plain, _ = trained(Deep, None, False, recompute=True, rows=1)
    module, again, trainer = trained(Deep, 0.5, False, recompute="auto", rows=1)

    assert_equal(plain, again)
    assert trainer.strategy.plan.recompute is True
    assert trainer.strategy.plan.reasons["recompute"] == (
        "because memory ran out: 3 blocks of layers (Block), detected"
    )
    assert "with activations recomputed (because memory ran out" in trainer.strategy.events[-1]
    assert not module.recomputes


def test_a_batch_is_first_split_as_small_as_possible_and_sizes_are_then_found_anew():
    _, plain, _ = trained(Deep, None, False, recompute=True, strategy={"micro_batch_size": 1})
    _, again, trainer = trained(Deep, 0.5, False, recompute="auto")

    repeats = [event.split(";")[1] for event in trainer.strategy.events if "repeated" in event]
    assert [text.split(" (")[0] for text in repeats[:4]] == [
        " repeated with micro-batches of 4 rows",
        " repeated with micro-batches of 2 rows",
        " repeated with micro-batches of 1 rows",
        " repeated with activations recomputed",
    ]
    assert trainer.strategy.micro_batch_size == 1
    assert_equal(plain, again)


def test_when_that_is_not_enough_the_run_gives_up_and_does_not_advise_it():
    with pytest.raises(OutOfMemoryError, match="even with the smallest micro-batch") as caught:
        trained(Deep, 0.1, False, recompute="auto", rows=1)

    assert "memory.recompute" not in str(caught.value)
    assert "hardware.precision=bf16-mixed" in str(caught.value)


def test_without_blocks_the_run_gives_up_as_before():
    class Flat(Deep):
        def __init__(self):
            super().__init__(0.5, norm=False)
            self.layers = nn.ModuleList([self.layers[0]])

    with pytest.raises(OutOfMemoryError, match=r"memory\.recompute=true"):
        trained(Flat, recompute="auto", rows=1)


def test_asked_for_as_false_it_is_never_turned_on():
    with pytest.raises(OutOfMemoryError, match="even with the smallest micro-batch"):
        trained(Deep, 0.5, False, recompute=False, rows=1)


def test_the_modules_own_switch_is_turned_on_for_want_of_memory_and_off_at_the_end():
    module, _, trainer = trained(Switch, 0.5, False, recompute="auto", rows=1)

    assert trainer.strategy.plan.reasons["recompute"] == "because memory ran out, by Switch.recompute"
    assert module.recompute is False


def test_a_batch_norm_that_forbids_cutting_is_recomputed_instead():
    _, plain, _ = trained(recompute=True)
    _, again, trainer = trained(Deep, 4, recompute="auto")

    assert_equal(plain, again)
    assert trainer.strategy.recoveries == 1
    assert trainer.strategy.micro_batch_size == 8


def test_a_loss_over_pairs_that_gradients_give_away_is_recomputed_instead():
    _, plain, _ = trained(Pairs, recompute=True)
    _, again, trainer = trained(Pairs, 4, recompute="auto")

    assert_equal(plain, again)
    assert trainer.strategy.micro_batch_size == 8


def test_if_it_still_does_not_fit_the_refusal_to_cut_it_is_repeats():
    with pytest.raises(SplitError, match="BatchNorm in train mode"):
        trained(Deep, 2, recompute="auto")


def test_another_run_beside_it_begins_with_what_was_found(tmp_path):
    def run(name):
        strategy = {"budget": "60%", "remember": str(tmp_path / name / "sizes.json")}
        return trained(Deep, 0.5, False, recompute="auto", rows=2, strategy=strategy)

    assert run("first")[2].strategy.recoveries > 0
    _, _, trainer = run("second")

    assert trainer.strategy.recoveries == 0
    assert "in an earlier run" in trainer.strategy.plan.reasons["recompute"]


class Plans(L.Callback):
    """Recomputes some of the blocks, as a plan would before the first step."""

    def __init__(self, policy):
        self.policy = policy

    def on_train_start(self, trainer, module):
        trainer.strategy.policy.recomputation.set(self.policy, why="as planned")


def test_a_plan_recomputes_the_first_blocks_and_weights_are_equal_bit_for_bit():
    _, plain, _ = trained(recompute=False)
    module, again, trainer = trained(recompute="auto", callbacks=[Plans(RecomputePolicy(blocks=2))])

    assert_equal(plain, again)
    assert [layer.runs for layer in module.layers] == [6, 6, 3]
    assert trainer.strategy.plan.reasons["recompute"] == (
        "as planned: the first 2 of 3 blocks of layers (Block), detected"
    )
    assert not any("forward" in vars(child) for child in module.modules())


def test_when_memory_runs_out_under_a_plan_all_blocks_recompute():
    class Middle(Deep):
        @property
        def recomputes(self):
            return "forward" in vars(self.layers[2])

    _, plain, _ = trained(Middle, None, False, recompute=True, rows=1)
    planned = Plans(RecomputePolicy(blocks=2))
    _, again, trainer = trained(Middle, 0.5, False, recompute="auto", rows=1, callbacks=[planned])

    assert_equal(plain, again)
    assert trainer.strategy.plan.reasons["recompute"] == (
        "because memory ran out: 3 blocks of layers (Block), detected"
    )
