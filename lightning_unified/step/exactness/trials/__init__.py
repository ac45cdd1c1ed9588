"""Trials: rows run whole and in micro-batches, and every result is compared.

| module | subject |
|---|---|
| examination | where trials run: device, activation checkpointing, CPU; and on how many rows |
| judge, comparison | one trial: whole and split runs, all results compared |
| proportion | whether a factor of the loss changes a backward pass by that factor only |
| trial_runs | the runs of one trial, with random draws replayed or left out |
| run | one run of `training_step` and its backward pass |
| evaluation_runs | the runs of a validation, test or predict step |
| results | undoing a run, and gathering its results |
| learning | how results of micro-batches merge |
| host | running a module on the CPU |
| refusals | error messages |
"""
