"""Loss and gradients equal those of a plain loop over single conversations.

The loop uses transformers and peft.
"""

import pytest
import torch

from lightning_unified import UnifiedStrategy
from tests.support.finetune import chats, data, fit
from tests.support.finetune.plain_loop import check_plain_loop, tuned
from tests.support.grpo.training import Gradients
from tests.support.lanes import crossed, first_cells, some


@first_cells(
    1,
    ("packing", "size"),
    crossed([False, True], [None, 1, 2, 3], fast=[(False, None), (False, 2), (True, 1), (True, 3)]),
)
def test_adapters_get_the_gradients_of_a_plain_loop(tmp_path, packing, size):
    check_plain_loop(tmp_path, "lora", packing=packing, size=size)


@first_cells(
    1,
    ("kind", "packing", "size"),
    crossed(
        ["dora", "full"],
        [False, True],
        [None, 1, 2],
        fast=[("dora", True, 1), ("full", False, None), ("full", True, 1)],
    ),
)
def test_dora_and_all_weights_get_them_too(tmp_path, kind, packing, size):
    check_plain_loop(tmp_path, kind, packing=packing, size=size)


@first_cells(1, ("packing", "kind"), crossed([False, True], ["lora", "full"], fast=[(False, "full"), (True, "lora")]))
def test_transformers_own_loss_agrees_as_far_as_it_is_float32(tmp_path, kind, packing):
    check_plain_loop(tmp_path, kind, packing=packing, size=2, stock=True, tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", some([1, 3], 3))
def test_a_loss_chunk_changes_no_gradient(tmp_path, size):
    seen, path = {}, chats(tmp_path)
    for chunk in (None, 2):
        module, seen[chunk] = tuned("lora"), Gradients()
        module.loss_chunk_rows = chunk
        strategy = UnifiedStrategy(micro_batch_size=size, predict=False)
        fit(module, data(path), tmp_path, seen[chunk], strategy=strategy, precision="64-true")
    for name, gradient in seen[None].steps[0].items():
        torch.testing.assert_close(seen[2].steps[0][name], gradient, rtol=1e-10, atol=1e-14)
