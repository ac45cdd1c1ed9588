"""The loss in chunks on sharded ranks: the same training, whatever a rank holds."""

from functools import cache

import pytest
import torch

import lightning_unified

pytest.importorskip("transformers")

from tests.support.causal_lms import causal_lm
from tests.support.lanes import slow
from tests.support.ranks import causal_lms
from tests.support.ranks.causal_lms import HeadApart, Llama
from tests.support.ranks.processes import on_ranks


@cache
def alone():
    return causal_lms.alone(keeps=True)


def chunked(hold, kind, *, micro_batch_size="auto", keeps=False):
    return on_ranks(causal_lms.chunked, hold, kind, micro_batch_size, keeps)


def assert_alike(fits, other):
    for fit in fits:
        torch.testing.assert_close(fit["weights"], other["weights"], rtol=0, atol=1e-10)
        assert fit["metrics"] == pytest.approx(other["metrics"], abs=2e-6)  # transformers computes the loss in float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hold", "rows"), [("shards", 3), slow("shards", "auto"), slow("parameters", 3), slow("parameters", "auto")]
)
def test_ranks_that_compute_the_loss_in_chunks_train_as_one_process(hold, rows):
    fits = chunked(hold, Llama, micro_batch_size=rows)

    assert_alike(fits, alone())
    assert [fit["kinds"] for fit in fits] == [{"LazyLogits"}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("hold", ["shards", "parameters"])
def test_logits_that_the_module_keeps_are_those_of_the_step(hold):
    fits = chunked(hold, Llama, keeps=True)

    assert_alike(fits, alone())
    read = torch.tensor([fit["read"] for fit in fits]).sum(0)
    torch.testing.assert_close(read, torch.tensor(alone()["read"]), rtol=1e-6, atol=0)


@pytest.mark.slow
def test_an_output_layer_that_is_gathered_for_itself_computes_its_logits_at_once():
    fits = chunked("shards", HeadApart)

    assert_alike(fits, alone())
    assert [fit["kinds"] for fit in fits] == [{"Tensor"}] * 2


@pytest.mark.parametrize("hold", ["shards", slow("parameters")])
def test_chunks_lower_the_predicted_peak_of_a_rank(hold):
    def peak(chunk):
        batch = {"tokens": torch.zeros(16, 64, dtype=torch.long)}
        module = Llama()
        module.model = causal_lm("Llama", vocab_size=4096, dtype=torch.float32)
        return lightning_unified.predict(
            module, batch, device="cpu", devices=2, strategy="unified_fsdp", hold=hold, loss_chunk=chunk
        ).peak_bytes

    logits = 16 * 64 * 4096 * 4
    assert peak(64) < peak(None) - logits
