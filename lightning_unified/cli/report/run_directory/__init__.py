"""Run directories read into records: files, metrics, events, and the figures derived from them."""
