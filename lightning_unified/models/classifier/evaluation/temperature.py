"""One number by which logits are divided, so that probabilities mean what they say.

Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", section 4.2, temperature scaling.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["LEAST", "MOST", "fit_temperature"]

LEAST, MOST = 0.05, 20.0  # where every row is right, the likeliest temperature would be 0


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature under which the labels are likeliest, found by L-BFGS in its logarithm, in float64 on the CPU.

    Shapes:
        logits (N, C), labels (N), of rows that were not trained on.
    """
    scores, labels = logits.detach().cpu().double(), labels.cpu()
    with torch.inference_mode(mode=False), torch.enable_grad():
        scores = scores.clone()  # what was made in inference mode takes no part in a backward pass
        logarithm = torch.zeros((), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([logarithm], max_iter=50, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(scores / logarithm.exp(), labels.clone())
            loss.backward()
            return loss

        optimizer.step(closure)
    found = float(logarithm.detach())
    if math.isnan(found):
        return 1.0
    return min(max(math.exp(min(max(found, -50.0), 50.0)), LEAST), MOST)
