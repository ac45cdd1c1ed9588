"""The exactness check: whether a batch's gradient, outputs, logs and state are those of its micro-batches put together.

| module | subject |
|---|---|
| check | when a batch is checked, and what follows |
| judge | one trial: rows run whole, the same rows in parts, all results compared |
| run | one run of `training_step` and its backward pass, with everything it made, undone afterwards |
| rows | which rows of a batch are checked, and in which parts |
| profile | what is new in a batch: label values, zeros, masks, lengths |
| draws | random draws of the whole run, replayed by row in the parts |
| host_draws | draws by Python and NumPy, made the same for every row |
| gradients | whether two gradients agree but for rounding |
| losses | by what the losses of micro-batches are weighted |
| merging, results | how values of micro-batches become the whole batch's |
| written | what the step writes into its module |
| host | running a module on the CPU |
"""
