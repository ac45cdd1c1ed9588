"""The memory of autoregressive generation, by formula."""
