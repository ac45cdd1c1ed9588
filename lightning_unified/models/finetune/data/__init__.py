"""Data for fine-tuning: conversations, prompts with completions, and plain texts."""
