"""The loss chunk of Hugging Face models in a fit: trained alike, planned, and undone."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy, plan, predict
from lightning_unified.cost_model.rates import tabled_rates
from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.lazy_logits.tensor import LazyLogits
from lightning_unified.options import AppliedOptions, LossChunk
from lightning_unified.options.loss_chunk import chunk_choices, chunk_of, offers_chunk
from lightning_unified.planner.search import compared, planner
from lightning_unified.planner.search.combinations import with_larger_chunks

transformers = pytest.importorskip("transformers")

from tests.support.causal_lms import VOCABULARY, causal_lm  # noqa: E402
from tests.support.lanes import first_cells  # noqa: E402
from tests.support.modules.decoders import CLASSES, Decoder  # noqa: E402


class Tuned(L.LightningModule):
    def __init__(self, network):
        super().__init__()
        self.network = network
        self.kinds, self.kept, self.plans = set(), [], []

    def training_step(self, batch, batch_idx):
        out = self.network(input_ids=batch, labels=batch)
        self.kinds.add(type(out.logits))
        self.log("accuracy", (out.logits[:, :-1].argmax(-1) == batch[:, 1:]).float().mean())
        return {"loss": out.loss, "logits": out.logits}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.kept.append(outputs["logits"].detach().clone())
        self.plans.append(getattr(self.trainer.strategy, "plan", None))

    def validation_step(self, batch, batch_idx):
        out = self.network(input_ids=batch, labels=batch)
        assert type(out.logits) is torch.Tensor
        self.log("validation", out.loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class LossOnly(Tuned):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.plans.append(getattr(self.trainer.strategy, "plan", None))


class Plain(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def wide(vocabulary=20_000, hidden=16, layers=1):
    """Return a model whose logits are larger than all else."""
    config = transformers.Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return LossOnly(transformers.AutoModelForCausalLM.from_config(config))


def fit(module, strategy, *, rows=8, length=9, vocabulary=VOCABULARY, validates=True):
    torch.manual_seed(5)
    data = torch.randint(3, vocabulary, (2 * rows, length))
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, rows), DataLoader(data[:rows], rows) if validates else None)
    return trainer


@pytest.fixture(scope="module", params=["Qwen2", pytest.param("Gemma2", marks=pytest.mark.slow)])
def whole(request):
    module = Tuned(causal_lm(request.param, dtype=torch.float32))
    trainer = fit(module, "auto")
    return request.param, module, dict(trainer.callback_metrics)


@first_cells(1, "settings", [{}, {"micro_batch_size": 3, "recompute": True}], ids=["whole", "split"])
def test_a_fit_in_chunks_equals_lightnings_with_its_logs_and_returned_logits(whole, settings):
    family, plain, metrics = whole
    module = Tuned(causal_lm(family, dtype=torch.float32))
    trainer = fit(module, UnifiedStrategy(loss_chunk=5, predict=False, **settings))

    assert module.kinds == {LazyLogits} and plain.kinds == {torch.Tensor}
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-3, atol=5e-5)
    for name, value in metrics.items():
        torch.testing.assert_close(trainer.callback_metrics[name], value, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(module.kept, plain.kept, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert (module.plans[0].loss_chunk, module.plans[0].reasons["loss_chunk"]) == (
        5,
        "5 rows, as asked: network.lm_head",
    )
    assert "in chunks of 5" in str(module.plans[0])
    assert "forward" not in vars(module.network.lm_head) and chunk_of(module) is None


def test_a_plan_in_little_memory_computes_the_loss_in_chunks():
    module = wide()
    trainer = fit(
        module, UnifiedStrategy(simulate="m2-16gb", budget="60MiB"), length=64, vocabulary=20_000, validates=False
    )

    assert module.kinds == {LazyLogits} and module.plans[0].loss_chunk == 128
    assert "the loss in chunks of 128" in trainer.strategy.events[0]
    assert trainer.strategy.recoveries == 0
    assert chunk_of(module) is None


def test_a_prediction_counts_the_chunk():
    module, batch = wide(), torch.zeros(8, 64, dtype=torch.long)
    whole, chunked = (
        predict(module, batch, device="mps", optimizer_kernel="for-loop", loss_chunk=rows).peak_bytes
        for rows in (None, 128)
    )

    assert whole - chunked > 1.5 * 8 * 64 * 20_000 * 4  # more than the logits in float32


@pytest.mark.slow
def test_a_plan_takes_the_users_chunk_and_false_forbids_any():
    module, batch = wide(), torch.zeros(8, 64, dtype=torch.long)
    settings = {"budget": "60MiB", "device": "mps", "rates": tabled_rates("m2-16gb")}
    never, always = (plan(module, batch, loss_chunk=asked, **settings) for asked in (False, 64))

    assert never.loss_chunk is None and always.loss_chunk == 64
    assert always.micro_batch_size > never.micro_batch_size
    assert all(one.loss_chunk is None for one in never.alternatives)
    assert all(one.loss_chunk == 64 for one in always.alternatives)


@first_cells(1, ("budget", "chunk"), [("700MiB", 2048), ("400MiB", 1024), ("1200MiB", 4096)])
def test_a_plan_takes_the_largest_chunk_that_fits_however_short_the_search(budget, chunk, monkeypatch):
    monkeypatch.setattr(compared, "_MOST_OPERATIONS", 0)
    batch, rates = torch.zeros(32, 256, dtype=torch.long), tabled_rates("NVIDIA H200")

    assert plan(wide(), batch, budget=budget, device="cuda", rates=rates).loss_chunk == chunk


def test_a_plan_in_chunks_stays_if_no_larger_chunk_fits_and_the_search_is_over(monkeypatch):
    def over(*args):
        monkeypatch.setattr(compared.ComparedOptions, "may_trace", lambda *_: False)
        return with_larger_chunks(*args)

    monkeypatch.setattr(planner, "with_larger_chunks", over)
    batch, rates = torch.zeros(32, 256, dtype=torch.long), tabled_rates("NVIDIA H200")
    found = plan(wide(hidden=64, layers=2), batch, budget="300MiB", device="cuda", rates=rates)

    assert (found.micro_batch_size, found.recomputed, found.loss_chunk) == (32, "1 of 2 blocks", 1024)


def test_chunks_are_offered_for_heads_and_a_chunk_that_is_set_is_kept():
    module = wide()
    assert offers_chunk(module) and chunk_choices(module) == (None, 4096, 2048, 1024, 128)
    assert chunk_choices(module, 7) == (7,) and chunk_choices(module, False) == (None,)
    chunk = LossChunk(module, 1024)
    assert chunk_of(module) == 1024 and chunk_choices(module) == (1024,)
    chunk.undo()
    chunk.undo()

    assert chunk_of(module) is None


def test_a_head_that_cannot_run_in_chunks_trains_as_it_is(caplog):
    module = Tuned(causal_lm("Llama", dtype=torch.float32))
    head = module.network.lm_head
    head.forward = lambda hidden: torch.nn.functional.linear(hidden, head.weight)
    assert not offers_chunk(module) and chunk_choices(module) == (None,)
    fit(module, UnifiedStrategy(loss_chunk=5, predict=False))

    assert module.kinds == {torch.Tensor}
    assert "network.lm_head stays as it is, because its forward was replaced on the object" in caplog.text
    assert "not network.lm_head, because" in module.plans[0].reasons["loss_chunk"]


def test_a_chunk_for_a_module_that_has_none_is_refused():
    options = AppliedOptions(loss_chunk=8)
    module = Plain()
    with pytest.raises(
        ConfigurationError, match=r"loss_chunk=8: Plain has no attribute loss_chunk_rows, .* no output head"
    ):
        options.begin(module, [module.configure_optimizers()])


@pytest.mark.parametrize("wrong", [True, 0, -1, "on", 1.5, None])
def test_another_value_is_refused_with_the_allowed_ones(wrong):
    with pytest.raises(ConfigurationError, match=r'loss_chunk=.*: give "auto", false, or a count of rows'):
        UnifiedStrategy(loss_chunk=wrong)
    with pytest.raises(ConfigurationError, match=r'loss_chunk=.*: give "auto", false, or a count of rows'):
        plan(Plain(), torch.zeros(2, 3), budget="1GiB", device="cpu", loss_chunk=wrong)


class Foreign(Tuned):
    """A decoder of the user's own, with an output head of some form."""

    def __init__(self, form):
        super().__init__(Decoder(form))

    def training_step(self, batch, batch_idx):
        loss = self.network(batch)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.plans.append(getattr(self.trainer.strategy, "plan", None))


@first_cells(1, "form", ["linear", "functional"])
def test_a_module_of_the_users_own_trains_in_chunks_as_in_lightning(form):
    plain, module = Foreign(form), Foreign(form)
    metrics = dict(fit(plain, "auto", vocabulary=CLASSES, validates=False).callback_metrics)
    trainer = fit(
        module,
        UnifiedStrategy(loss_chunk=5, micro_batch_size=3, recompute=True, predict=False),
        vocabulary=CLASSES,
        validates=False,
    )

    assert set(plain.network.kinds) == {torch.Tensor} and LazyLogits in module.network.kinds
    head = "network.head" if form == "linear" else "the tied weights after network.norm"
    assert module.plans[0].reasons["loss_chunk"] == f"5 rows, as asked: {head}"
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-3, atol=5e-5)
    torch.testing.assert_close(trainer.callback_metrics["loss"], metrics["loss"])
    assert not any("forward" in vars(one) for one in module.modules())


@pytest.mark.slow
@first_cells(1, "form", ["linear", "transposed"])
def test_a_prediction_counts_the_chunk_of_a_users_own_module(form):
    module, batch = Foreign(form), torch.zeros(16, 129, dtype=torch.long)
    logits = 16 * 128 * CLASSES * 4
    whole, chunked = (
        predict(module, batch, device="mps", optimizer_kernel="for-loop", loss_chunk=rows).peak_bytes
        for rows in (None, 128)
    )
    assert whole - chunked > 1.5 * logits


@pytest.mark.slow
@pytest.mark.parametrize("form", ["linear", "transposed"])
def test_a_plan_chooses_the_chunk_of_a_users_own_module(form):
    module, batch = Foreign(form), torch.zeros(16, 129, dtype=torch.long)
    settings = {"budget": "36MiB", "device": "mps", "rates": tabled_rates("m2-16gb")}
    chosen, never = (plan(module, batch, loss_chunk=asked, **settings) for asked in ("auto", False))
    assert (chosen.loss_chunk, chosen.micro_batch_size, never.micro_batch_size) == (128, 16, 1)
