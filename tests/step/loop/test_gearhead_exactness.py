"""GearHead without dropout, split at every size.

It has two losses with different denominators, token tables and a diagnostic head.
"""

import pytest
import torch

from lightning_unified import UnifiedStrategy
from lightning_unified.models.gearhead import GearHead
from tests.support.lanes import some
from tests.support.modules.plain import Rows, fit, weights

EXACT = {"rtol": 1e-12, "atol": 1e-14}


def gearhead() -> GearHead:
    torch.manual_seed(0)
    return GearHead(
        preset="gearhead-small", vocabulary=64, positions=16, width=16, layers=2, heads=2, feed_forward=32, dropout=0.0
    ).double()


def loader() -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(9, 64, (14, 16), generator=generator)
    labels, codes = tokens.clone(), torch.zeros_like(tokens)
    asked = torch.full_like(tokens, -100)
    for row in range(len(tokens)):
        labels[row, 3 + row :] = -100
        codes[row, row % 5] = 1 + row
        if row % 3:
            asked[row, 2] = row
    rows = [
        {"input_ids": tokens[row], "labels": labels[row], "error_code_ids": codes[row], "diagnosis_labels": asked[row]}
        for row in range(len(tokens))
    ]
    return torch.utils.data.DataLoader(Rows(rows), batch_size=5)


@pytest.mark.parametrize("window", some([1, 3], 3))
def test_gearheads_gradients_do_not_depend_on_the_micro_batch_size(window):
    reference = gearhead()
    options = {"accumulate_grad_batches": window, "gradient_clip_val": 0.5, "max_epochs": 1}
    plain, _ = fit(reference, loader(), **options)
    for size in (1, 2, 3, 5):
        module = gearhead()
        seen, _ = fit(module, loader(), strategy=UnifiedStrategy(micro_batch_size=size), **options)

        torch.testing.assert_close(torch.stack(seen.gradients), torch.stack(plain.gradients), **EXACT)
        torch.testing.assert_close(weights(module), weights(reference), **EXACT)
        assert seen.callback_metrics[0] == pytest.approx(plain.callback_metrics[0], rel=1e-6)
