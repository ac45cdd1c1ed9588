"""Attention in chunks as an option: equal training, planned, undone after the fit."""

import logging
from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy, plan, predict
from lightning_unified.cost_model.rates import tabled_rates
from lightning_unified.errors import ConfigurationError
from lightning_unified.nn.attention import ChunkedAttention, function, queries_of_chunk
from lightning_unified.nn.recomputing import RecomputePolicy
from lightning_unified.options.attention import attention_choices
from lightning_unified.planner.search.combinations import combinations_to_compare
from tests.support.lanes import first_cells, some

WIDTH, LENGTH = 32, 96
FAMILIES = ("Bart", "Falcon", "GPT2", "GPTNeoX", "Gemma3", "Llama", "Mistral", "OPT", "Phi3", "Qwen2")


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(function, "queries_of_chunk", partial(queries_of_chunk, target=1))


def trained(module, step):
    """Return the loss of a step, and the gradients."""
    module.zero_grad()
    torch.manual_seed(3)
    loss = step(module)
    loss.backward()
    return [loss.detach(), *(one.grad.clone() for one in module.parameters() if one.grad is not None)]


def assert_alike(module, step):
    expected = trained(module, step)
    attention = ChunkedAttention(module)
    try:
        found = trained(module, step)
    finally:
        attention.remove()

    assert attention.calls > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("small_chunks")
@first_cells(1, "family", some(FAMILIES, "Bart", "Falcon", "GPT2", "Gemma3"))
def test_a_transformers_model_trains_alike(family):
    pytest.importorskip("transformers")
    from tests.support.causal_lms import VOCABULARY, causal_lm

    ids = torch.randint(3, VOCABULARY, (2, 41), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 30:] = 0
    for given in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        assert_alike(causal_lm(family), lambda model, given=given: model(**given, labels=ids).loss)


@pytest.mark.usefixtures("small_chunks")
@first_cells(1, "causal", [True, False])
def test_torchs_transformer_encoder_trains_alike(causal):
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 41, WIDTH, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(41, dtype=torch.float64) if causal else None
    padding = None if causal else torch.arange(41) >= torch.tensor([[41], [20]])
    step = lambda net: net(x, mask=mask, src_key_padding_mask=padding, is_causal=causal).square().mean()  # noqa: E731

    assert_alike(net, step)


class Attentive(L.LightningModule):
    """One layer of attention per head width; `own` computes its weights itself."""

    def __init__(self, *, own=False, dropout=0.0, blocks=2):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=dropout, batch_first=True)
        self.net = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.own = nn.MultiheadAttention(WIDTH, 2, batch_first=True) if own else None
        self.seen, self.plans, self.fails = set(), [], False

    def training_step(self, batch, batch_idx):
        self.seen.add(F.scaled_dot_product_attention is function.TORCHS)
        x = self.net(batch)
        if self.own is not None:
            x = self.own(x, x, x)[0]
        return (x - 1).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.plans.append(getattr(self.trainer.strategy, "plan", None))
        if self.fails:
            raise RuntimeError("the user's own error")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class WithoutAttention(Attentive):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)


def fit(module, *, rows=4, length=LENGTH, **options):
    data = torch.randn(2 * rows, length, WIDTH, generator=torch.Generator().manual_seed(4))
    strategy = UnifiedStrategy(**options) if options else "auto"
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, rows))
    return trainer


SETTINGS = {
    "whole": {},
    "split": {"micro_batch_size": 3},
    "recomputed": {"recompute": True},
}


@pytest.mark.usefixtures("small_chunks")
@first_cells(1, "how", some(SETTINGS, "split", "recomputed"))
def test_a_fit_in_chunks_equals_lightnings(how):
    plain, module = Attentive(), Attentive()
    fit(plain)
    fit(module, attention="chunked", predict=False, **SETTINGS[how])

    assert module.plans[0].attention == "chunked" and module.plans[0].reasons["attention"] == "chunked, as asked"
    assert "chunked" in str(module.plans[0])
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert F.scaled_dot_product_attention is function.TORCHS


@pytest.mark.usefixtures("small_chunks")
def test_dropout_in_micro_batches_passes_the_exactness_check():
    trainer = fit(Attentive(dropout=0.3), attention="chunked", micro_batch_size=3, predict=False)

    assert not [event for event in trainer.strategy.events if "unchecked" in event]


def test_attention_is_restored_after_an_exception():
    module = Attentive()
    module.fails = True
    with pytest.raises(RuntimeError, match="the user's own error"):
        fit(module, attention="chunked", predict=False)

    assert module.seen == {False} and F.scaled_dot_product_attention is function.TORCHS


@pytest.mark.parametrize("backend", ["cpu", "cuda", "rocm"])
def test_auto_keeps_torchs_attention_where_it_has_fused_kernels(backend):
    assert attention_choices(Attentive(), "auto", backend=backend) == (None,)


def test_modules_that_compute_weights_themselves_are_named_in_one_line(caplog):
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        fit(Attentive(own=True), attention="chunked", predict=False)
    said = [one.getMessage() for one in caplog.records if "memory.attention" in one.getMessage()]

    assert len(said) == 1 and "own (nn.MultiheadAttention, unless need_weights=False)" in said[0]


def test_a_module_without_attention_gets_a_message_that_nothing_changed(caplog):
    module = WithoutAttention()
    with caplog.at_level(logging.WARNING, "lightning_unified"):
        fit(module, attention="chunked", predict=False)

    assert any("changed nothing: WithoutAttention never called" in one.getMessage() for one in caplog.records)


class Language(Attentive):
    """A model of Qwen2's kind with random weights."""

    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.Qwen2Config(
            vocab_size=128, hidden_size=64, num_hidden_layers=2, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
            tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        self.net = transformers.AutoModelForCausalLM.from_config(config)

    def training_step(self, batch, batch_idx):
        ids = batch[..., 0].abs().long()
        return self.net(input_ids=ids, labels=ids).loss


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("attention", some(["torch", "chunked"], "chunked"))
@pytest.mark.parametrize(
    "settings",
    [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in ({"recompute": True}, {"precision": "bf16-mixed"}))],
    ids=str,
)
def test_the_simulated_mac_takes_the_predicted_memory(attention, settings):
    module = Language()
    trainer = fit(module, length=512, rows=2, attention=attention, simulate="m2-16gb", budget="400MiB", **settings)
    predicted, counted = module.plans[-1].prediction.peak_bytes, trainer.strategy.simulated.allocator.peak

    assert module.plans[-1].attention == (None if attention == "torch" else "chunked")
    assert module.plans[-1].micro_batch_size == 2
    assert counted == pytest.approx(predicted, rel=0.03)


@pytest.mark.slow
def test_auto_plans_chunks_on_a_mac_where_they_let_more_rows_fit():
    module = Attentive(blocks=4)
    trainer = fit(module, length=512, rows=2, simulate="m2-16gb", budget="64MiB")

    assert module.plans[-1].attention == "chunked" and module.seen == {False}
    assert "chunked attention" in trainer.strategy.events[0] and trainer.strategy.recoveries == 0
    assert F.scaled_dot_product_attention is function.TORCHS


def test_a_prediction_counts_the_scores_of_one_chunk():
    module, batch = Attentive(blocks=4), torch.zeros(4, 512, WIDTH)
    whole, chunked = (predict(module, batch, device="mps", attention=kind).peak_bytes for kind in (None, "chunked"))

    assert whole - chunked > 3 * 4 * 4 * 512 * 512 * 4  # the probabilities of three layers in float32


@pytest.mark.slow
def test_plans_compare_attention_only_where_it_is_open():
    batch, options = torch.zeros(1, 64, WIDTH), {"budget": "8MiB", "recompute": False, "rates": tabled_rates("m2-16gb")}

    def compared(module, device, asked):
        found = plan(module, batch, device=device, attention=asked, **options)
        return {one.attention for one in (found, *found.alternatives)}

    assert compared(Attentive(blocks=1), "mps", "auto") == {None, "chunked"}
    assert compared(Attentive(blocks=1), "mps", "torch") == compared(Attentive(blocks=1), "cuda", "auto") == {None}
    assert compared(Attentive(blocks=1), "mps", "chunked") == {"chunked"}
    assert compared(WithoutAttention(), "mps", "auto") == {None}


def test_the_users_attention_is_compared_first_and_chunks_alone_always():
    policies = [RecomputePolicy(blocks=0), RecomputePolicy(blocks="all")]
    found = combinations_to_compare("32-true", policies=policies, chunks=(None, 128), attentions=(None, "chunked"))
    head = [(one.recomputes, one.loss_chunk, one.attention) for one in found if one.always]

    assert head == [
        (False, None, None),
        (True, 128, "chunked"),
        (False, 128, None),
        (True, None, "chunked"),
        (False, None, "chunked"),
    ]
    assert len(set(found)) == len(found) == 8


@pytest.mark.slow
def test_compiled_modules_keep_torchs_attention():
    module = Attentive()
    module.net.compile()

    assert attention_choices(module, "auto", backend="mps") == (None,)
    with pytest.raises(ConfigurationError, match=r"attention=chunked: Attentive holds compiled modules \(net\)"):
        fit(module, attention="chunked", predict=False)
    with pytest.raises(ConfigurationError, match=r'compile="blocks": attention in chunks runs outside compiled code'):
        fit(Attentive(), attention="chunked", compile="blocks", predict=False)
    assert F.scaled_dot_product_attention is function.TORCHS


@pytest.mark.parametrize("wrong", ["math", True, None, 64])
def test_an_attention_that_is_none_is_refused(wrong):
    with pytest.raises(ConfigurationError, match=r'attention=.*: give "auto", "chunked" or "torch"'):
        UnifiedStrategy(attention=wrong)
