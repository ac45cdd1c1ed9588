"""Explain predictions: attributions of tokens, a deletion test, and their rendering."""
