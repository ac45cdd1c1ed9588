"""Tokenizers of encoders: loaded, trained, and stored in checkpoints."""
