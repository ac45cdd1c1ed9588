"""The classifier's network: encoder, head, adapters, and trimming of padding."""
