"""Facts about a batch, its module and the progress of a run.

The exactness check checks a batch with new facts before its update.
"""
