"""Products of one input are one operation of the compiled block, and compute the same."""

import operator
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from lightning_unified.models.causal_lm.language_model import causal_lm
from lightning_unified.models.grpo.rollout.few_rows.layers import reading_weights_once
from lightning_unified.models.grpo.rollout.few_rows.operators import products
from lightning_unified.models.grpo.rollout.few_rows.sharing import joining
from lightning_unified.models.pretrained.architecture import blocks_of
from tests.support.grpo.rollout import language_model, prompts


def counted(found: list[Counter]):
    """Return a compiler backend that counts each graph's operations and runs them."""

    def backend(module, inputs):
        found.append(Counter(node.target for node in module.graph.nodes if node.target is not operator.getitem))
        return module.forward

    return joining(backend)


def compiled_logits(model, prompt: Tensor, mask: Tensor, found: list[Counter]) -> Tensor:
    torch._dynamo.reset()
    blocks = blocks_of(causal_lm(model))
    for block in blocks:
        block.compile(backend=counted(found))
    with reading_weights_once(blocks, rows=len(prompt)):
        return model(input_ids=prompt, attention_mask=mask.long(), use_cache=False).logits


@pytest.mark.parametrize("kind", ["Qwen2", "Llama"])
@pytest.mark.parametrize("adapters", [False, True])
def test_a_block_computes_all_products_of_one_input_at_once(kind: str, *, adapters: bool) -> None:
    model = language_model(kind, adapters=adapters, dtype=torch.bfloat16).eval()
    (prompt, mask), found = prompts(), []
    with torch.no_grad():
        expected = model(input_ids=prompt, attention_mask=mask.long(), use_cache=False).logits
        torch.testing.assert_close(compiled_logits(model, prompt, mask, found), expected)
    operators = torch.ops.lightning_unified
    for block in found:
        # queries, keys and values; the attention's output; both halves of the gated layer; its output
        assert block[operators.products_of_few_rows.default] == 4
        # adapters of queries, keys and values; of the attention's output
        assert block[operators.add_adapters.default] == (2 if adapters else 0)


def test_a_product_that_needs_a_later_value_stays_alone() -> None:
    torch._dynamo.reset()
    weights, found = [nn.Linear(4, 4).weight for _ in range(3)], []

    def chain(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        [first] = products(x, [weights[0]], [None])
        [second] = products(x, [weights[1] * first.sum()], [None])
        [third] = products(x, [weights[2]], [None])
        return first, second, third

    x = torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(chain, backend=counted(found))(x), chain(x))
    assert found[0][torch.ops.lightning_unified.products_of_few_rows.default] == 2


def written(x: Tensor) -> None:
    x.add_(1)


def assigned(x: Tensor) -> None:
    x[0] = 1


def added(x: Tensor) -> None:
    x += 1


@pytest.mark.parametrize("change", [written, assigned, added])
def test_products_of_an_input_that_changes_between_them_stay_apart(change) -> None:
    torch._dynamo.reset()
    weights, found = [nn.Linear(4, 4).weight for _ in range(2)], []

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        [first] = products(x, [weights[0]], [None])
        change(x)
        [second] = products(x, [weights[1]], [None])
        return first, second

    x = torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(both, backend=counted(found))(x.clone()), both(x.clone()))


@pytest.mark.parametrize("rows", [3, 65])
def test_layers_are_replaced_for_few_rows_and_put_back(rows: int) -> None:
    model = language_model(adapters=True, dtype=torch.bfloat16)
    blocks = blocks_of(causal_lm(model))
    layers = [layer for block in blocks for layer in block.modules()]
    with reading_weights_once(blocks, rows=rows):
        # q, k, v, o, and three of the feed-forward layer; with 65 rows reading weights is no longer what takes time
        assert sum("forward" in vars(layer) for layer in layers) == (7 * len(blocks) if rows == 3 else 0)
    assert not any("forward" in vars(layer) for layer in layers)


def test_layers_with_hooks_or_weights_of_another_kind_stay_as_they_are() -> None:
    class Quantized(nn.Parameter):
        pass

    blocks = blocks_of(language_model())
    blocks[0].mlp.down_proj.weight = Quantized(blocks[0].mlp.down_proj.weight.data)
    blocks[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    with reading_weights_once(blocks, rows=3):
        assert "forward" not in vars(blocks[0].mlp.up_proj)
        assert "forward" not in vars(blocks[0].mlp.down_proj)
        assert "forward" in vars(blocks[0].mlp.gate_proj)
