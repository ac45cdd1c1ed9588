"""Read pretrained models: sources, weights, GGUF files, adapters and chat templates."""
