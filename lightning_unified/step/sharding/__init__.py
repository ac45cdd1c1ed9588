"""Sharded ranks: parameters, gradients and optimizer state are divided over all ranks (FSDP2).

1. *Wrap* (`wrapping`). The module's repeated blocks become groups of parameters that are gathered together.
2. *Hold*. During a step a rank has whole parameters (`shards`), or one block at a time (`kept_shards`).
3. *Step*. With whole parameters each rank runs, checks and repeats its own batch (`whole_loop`). With one block at a time all ranks run the same
   passes (`lockstep`), and check their batches together (`checks`). Both update their own rows (`update`).
4. *Leave*. After a step that failed, FSDP2's own state is reset (`iteration`).
5. *Save* each rank's rows (`saving`, `rows`). Plans see the module without its shards (`unsharded`).
"""
