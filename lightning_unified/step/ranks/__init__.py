"""Several ranks: every rank runs the same step, or none does.

Data-parallel ranks share collectives, such as the reduction of gradients. A rank that runs out of memory never joins
the collective that the others have started, and they wait for it until a timeout. So no section of a step that may fail
and be repeated contains a collective. Between such sections, ranks meet: each sends one small record over a socket, and
all read the records of all.

1. *Meet* (`consensus`). A record holds the meeting point, the outcome, and a few numbers. If one rank ran out of
   memory, all undo the step and repeat it. If one failed otherwise, or is gone, all stop with an error that names it.
2. *Run* (`loop`). Each rank runs forward and backward of its own batch, in as many micro-batches as its memory needs.
3. *Reduce* (`reduction`). Gradients are averaged once a window, in memory that was reserved before.
4. *Resync* (`resync`). A rank whose optimizer step failed copies weights and optimizer state from a rank whose step
   succeeded.
5. *Agree on sizes* (`policy`). All ranks use the micro-batch sizes of the most careful one.
"""
