"""Check that a split batch gives the gradient, results and state of the whole batch.

The idea. A batch B of n rows is split into micro-batches B_1 … B_k. Suppose that the module treats rows independently, and its loss is a
mean over terms. Then the gradient of B is a weighted sum of the micro-batches' gradients:

    g(B) = sum_i w_i g(B_i),    w_i = terms(B_i) / terms(B)

The code of a module shows neither condition. A contrastive loss mixes rows. A mean may have weights that no field holds. So the
check runs some rows whole, runs the same rows in three unequal micro-batches, and compares every result.

1. *Rows* are chosen so that labels, masks, lengths and missing values differ among the micro-batches (`rows`).
2. *Runs* are undone: gradients, buffers, attributes, logs and random generators are restored after each run (`trials.results`).
3. *Random draws* of the whole run are recorded and replayed by row, so that dropout does not hide a difference (`draws`).
4. *Gradients* are compared parameter by parameter, up to rounding, under each candidate rule for the weights w_i (`gradients`, `losses`).
5. *Results*, that is outputs, logs, metrics and written state, get a merge rule, such as a mean or a concatenation (`trials.learning`).
6. *Verdict*: a loss rule agrees, or none does and the module is refused, or gradients are undecided (`trials.judge`, `verdict`).

One check sees only a sample of the data, so checks repeat: at split batches 1, 2, 4, 8, …, and before the update of a batch with new facts
(`check`, `facts`). A check that does not fit into memory runs with activation checkpointing, or on the CPU (`trials.examination`, `trials.host`).

| module | subject |
|---|---|
| check | the schedule in training, and the outcome |
| group | the processes that run a check: one alone, or all ranks |
| agreement | the loss rules that agreed in checks so far |
| evaluation | the check of validation, test and predict steps |
| trials | one trial: whole and split runs, and the comparison of all results |
| rows | the rows of a check, and their split |
| gradients | whether two gradients agree up to rounding |
| losses, findings, verdict | candidate loss rules, the shares they give, what a trial found, and the verdict |
| tables | the merge rules of one stage |
| draws | random draws, recorded and replayed, or made equal |
| facts | facts about a batch, its module and the run's progress |
| parameters | what a step does with weights, and with gradients of the batch before |
"""
