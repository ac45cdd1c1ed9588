"""Temperature scaling: one divisor of the logits that calibrates probabilities.

Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", section 4.2, temperature scaling.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["LEAST", "MOST", "fit_temperature"]

LEAST, MOST = 0.05, 20.0  # if every row is right, the likeliest temperature would be 0


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Fit the most likely temperature for the labels by L-BFGS, in float64 on the CPU.

    The optimisation runs over the temperature's logarithm.

    Shapes:
        logits (N, C), labels (N), of validation rows.
    """
    scores, labels = logits.detach().cpu().double(), labels.cpu()
    with torch.inference_mode(mode=False), torch.enable_grad():
        scores = scores.clone()  # tensors from inference mode cannot take part in a backward pass
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
