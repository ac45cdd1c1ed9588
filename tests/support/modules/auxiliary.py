"""An auxiliary loss that autograd adds to a step, as in DeepSeek's experts."""

import torch


class WithAuxiliaryLoss(torch.autograd.Function):
    """Gives an auxiliary loss the gradient 1, whatever the gradient of the loss is."""

    @staticmethod
    def forward(ctx, hidden, auxiliary):
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones((), dtype=gradient.dtype)
