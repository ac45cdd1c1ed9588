"""The chunked loss, and networks with a large vocabulary."""
