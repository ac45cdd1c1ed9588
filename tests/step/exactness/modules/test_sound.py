"""Sound modules are split, in every precision and with dropout on.

None is refused or goes unchecked.
"""

import pytest
import torch

from lightning_unified import UnifiedStrategy
from tests.support.lanes import first_cells, slow, some
from tests.support.modules.plain import fit, weights
from tests.support.modules.sound import OPTIONS, SOUND


def run(kind, *, precision="32-true", seed=0, strategy=None):
    torch.manual_seed(seed)
    module = kind()
    strategy = strategy or UnifiedStrategy(micro_batch_size=3)
    fit(module, kind.loader(seed), strategy=strategy, precision=precision, max_epochs=1, **OPTIONS.get(kind, {}))
    return module, strategy


@pytest.mark.parametrize("precision", ["32-true", slow("bf16-mixed"), slow("bf16-true")])
@first_cells(4, "kind", SOUND, ids=lambda kind: kind.__name__)
def test_a_sound_module_is_split_by_its_rule(kind, precision):
    _, strategy = run(kind, precision=precision)

    assert strategy.plan.reasons["loss_weight"].startswith(f"{kind.rule}: gradients of ")


@first_cells(1, "kind", some(SOUND, *list(SOUND)[::2]), ids=lambda kind: kind.__name__)
def test_without_dropout_its_weights_are_plain_lightnings(kind):
    class Still(kind):
        def on_train_start(self):
            for child in self.modules():
                if isinstance(child, torch.nn.Dropout | torch.nn.Dropout2d):
                    child.p = 0.0
                if isinstance(child, torch.nn.MultiheadAttention | torch.nn.LSTM):
                    child.dropout = 0.0

    OPTIONS[Still] = OPTIONS.get(kind, {})
    plain, _ = run(Still, strategy="auto")
    split, _ = run(Still)

    torch.testing.assert_close(weights(split), weights(plain), rtol=1e-4, atol=1e-6)
