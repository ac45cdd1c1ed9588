"""Log-probabilities in chunks equal those from all logits, gradients too.

The logits never exist at once.
"""

import pytest
import torch

from lightning_unified.nn.token_log_probs import token_log_probs, token_log_probs_and_entropy


def _operands(dtype=torch.float64, *, rows=11, width=7, vocabulary=23):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    tokens = torch.randint(vocabulary, (rows,), generator=generator)
    outer = torch.randn(rows, generator=generator, dtype=torch.float64)
    return hidden, weight, tokens, outer


def _plain(hidden, weight, tokens, temperature):
    scores = (hidden @ weight.T / temperature).log_softmax(1)
    return scores.gather(1, tokens[:, None]).squeeze(1), -(scores.exp() * scores).sum(1)


@pytest.mark.parametrize("chunk", [None, 1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_values_and_gradients_are_those_of_all_logits(chunk, temperature):
    hidden, weight, tokens, outer = _operands()
    expected, entropy = _plain(hidden, weight, tokens, temperature)
    gradients = torch.autograd.grad((expected * outer).sum(), (hidden, weight))

    found, found_entropy = token_log_probs_and_entropy(hidden, weight, tokens, temperature=temperature, chunk=chunk)
    found_gradients = torch.autograd.grad((found * outer).sum(), (hidden, weight))

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_entropy, entropy, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(found_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("transform", [lambda logits: 2 * torch.tanh(logits / 2), lambda logits: torch.tanh(logits)])
def test_a_bias_and_a_transform_are_part_of_the_logits(chunk, transform):
    hidden, weight, tokens, outer = _operands()
    bias = torch.linspace(-1, 1, len(weight), dtype=torch.float64, requires_grad=True)
    scores = (transform(hidden @ weight.T + bias) / 0.3).log_softmax(1)
    expected = scores.gather(1, tokens[:, None]).squeeze(1)
    given = {"bias": bias, "temperature": 0.3, "chunk": chunk, "transform": transform}
    found, entropy = token_log_probs_and_entropy(hidden, weight, tokens, **given)
    of = (hidden, weight, bias)

    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, -(scores.exp() * scores).sum(1), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad((found * outer).sum(), of), torch.autograd.grad((expected * outer).sum(), of), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_the_entropy_has_no_gradient():
    hidden, weight, tokens, _ = _operands()
    assert not token_log_probs_and_entropy(hidden, weight, tokens)[1].requires_grad


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, tokens, _ = _operands()
    token_log_probs(hidden, weight.detach_(), tokens).sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_half_precision_has_a_softmax_in_float32():
    hidden, weight, tokens, outer = _operands(torch.bfloat16, rows=64, vocabulary=400)
    found = token_log_probs(hidden, weight, tokens)
    found_gradient = torch.autograd.grad((found * outer).sum(), hidden)[0]
    wide, weights = hidden.detach().double().requires_grad_(), weight.detach().double()
    expected = _plain(wide, weights, tokens, 1.0)[0]
    gradient = torch.autograd.grad((expected * outer).sum(), wide)[0]

    assert found.dtype == torch.float32
    assert found_gradient.dtype == torch.bfloat16
    # one rounding of each logit and of each entry of the gradient, none of a softmax's sum
    assert float((found - expected).detach().abs().max()) < 2**-8 * float((wide @ weights.T).detach().abs().max())
    assert float((found_gradient - gradient).norm() / gradient.norm()) < 2**-6


def test_autocast_decides_the_products():
    hidden, weight, tokens, _ = _operands(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_log_probs(hidden, weight, tokens)
    halves = token_log_probs(hidden.bfloat16(), weight.bfloat16(), tokens)
    assert torch.equal(found, halves)
    assert not torch.equal(found, token_log_probs(hidden, weight, tokens))


def test_all_logits_are_never_there_at_once():
    """The largest tensors are a chunk of logits, the weight and the hidden states.

    Forward and backward pass are counted alike.
    """
    hidden, weight, tokens, _ = _operands(torch.float32, rows=96, width=8, vocabulary=128)
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            largest.extend(
                one.numel() for one in (result if isinstance(result, tuple) else (result,)) if hasattr(one, "numel")
            )
            return result

    with Watch():
        token_log_probs(hidden, weight, tokens, chunk=8).sum().backward()
    assert max(largest) == max(8 * 128, weight.numel(), hidden.numel())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, "do not fit"),
        ({"temperature": 0.0}, "temperature=0.0; give a number above 0"),
        ({"chunk": 0}, "chunk=0 is not a number of rows"),
    ],
)
def test_what_makes_no_sense_is_refused(changed, words):
    hidden, weight, tokens, _ = _operands()
    options = {"tokens": tokens, **changed}
    with pytest.raises(ValueError, match=words):
        token_log_probs(hidden, weight, **options)


@pytest.mark.gpu
def test_a_large_vocabulary_takes_a_few_chunks_on_a_gpu():
    """8,192 tokens of a vocabulary of 151,936 have 4.6 GiB of float32 logits."""
    hidden = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(151_936, 2048, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randint(151_936, (8192,), device="cuda")
    token_log_probs(hidden, weight, tokens).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_log_probs(hidden, weight, tokens).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**29
