"""Use of a trained classifier: load, classify, export."""
