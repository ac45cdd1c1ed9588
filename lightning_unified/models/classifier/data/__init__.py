"""The classifier's data: labelled texts, split by class, as batches of one encoder's tokens."""
