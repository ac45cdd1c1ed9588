"""The classifier: accuracy, devices, loading, padding, and Hugging Face's Trainer."""
