"""A fine-tuned model in use: loading, chat, evaluation and export."""
