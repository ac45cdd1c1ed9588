"""The policy: decides from a window of embeddings which tokens to keep.

Letters for shapes: B texts, T tokens, D width of an embedding.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_unified.models.compressor.sizes import PolicyConfig
from lightning_unified.models.decoder_sizes import check_parameters

__all__ = ["KeepPolicy"]

_POSITION_STD = 0.02


class KeepPolicy(nn.Module):
    """A multilayer perceptron per token and a convolution over neighbours.

    With learned positions, they give one logit a token. It reads embeddings, not contextual states, so that deciding
    costs a small part of reading the text.

    Raises:
        RuntimeError: If the number of parameters differs from the configuration's.
    """

    def __init__(self, config: PolicyConfig, *, width: int) -> None:
        super().__init__()
        self.config = config
        hidden, joined = config.width, config.features + config.position_width
        self.token = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.window = nn.Conv1d(hidden, hidden, config.window)
        self.features = nn.Linear(hidden, config.features)
        self.positions = nn.Embedding(config.positions, config.position_width)
        self.head = nn.Sequential(nn.Linear(joined, config.head), nn.ReLU(), nn.Linear(config.head, 1))
        self._initialise()
        check_parameters(self, stated=config.parameters(width))

    @torch.no_grad()
    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv1d)):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.positions.weight, std=_POSITION_STD)

    @override
    def forward(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Return the log-odds (B, T) of keeping each token, arbitrary at pads.

        Shapes:
            embeddings (B, T, D); mask (B, T) bool, True at tokens.

        Raises:
            ValueError: If the texts exceed the policy's positions.
        """
        T = embeddings.shape[1]
        if self.config.positions < T:
            raise ValueError(
                f"{T} tokens; this policy has {self.config.positions} positions. Divide the text into pieces."
            )
        # an even window reaches one token further back than ahead; zeros pad both ends
        ahead = self.config.window - 1 - self.config.window // 2
        x = self.token(embeddings) * mask.unsqueeze(-1)
        x = functional.pad(x.transpose(1, 2), (self.config.window // 2, ahead))
        x = torch.relu(self.window(x)).transpose(1, 2)
        positions = self.positions.weight[:T].expand(len(x), -1, -1)
        return self.head(torch.cat([self.features(x), positions], dim=-1)).squeeze(-1)
