"""The tests of Lightning Unified."""
