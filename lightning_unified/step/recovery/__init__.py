"""Recovery: recognise out-of-memory errors, restore state, reduce sizes, clear caches.

| module | subject |
|---|---|
| oom | each backend's out-of-memory errors, and releasing memory |
| snapshot, generators, weights | state before and around the optimizer step |
| undone_run | a run of `training_step` that leaves nothing behind |
| sizes, sizes_file | micro-batch sizes, learnt and saved |
| budget_watch | the budget, and the use of it |
| cache_care, kept | memory that can be given back between batches |
| checkpoint_io | checkpoint files that are whole or absent |
"""
