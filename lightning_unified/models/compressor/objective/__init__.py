"""The compressor's losses: estimators, their joint loss, and the price of kept tokens."""
