"""Layer 3: one training step, split exactly, undone and repeated.

It is repeated in smaller micro-batches when memory runs out.

| package | subject |
|---|---|
| loop | Lightning's automatic optimization, run in micro-batches |
| policy | the decisions about splits and sizes |
| split | rows, roles and splitters of batches |
| exactness | the check that split batches give the whole batch's result |
| results | merging logs, outputs, metrics and written state |
| encoders | chunked encoders of a loss over pairs |
| undo | recording and restoring the state that a step may change |
| faults | GPU faults that raise nothing, on Metal |
| recovery | out-of-memory errors, snapshots, sizes, budget |
| ranks | agreement among several processes |
| evaluation | validation, test and predict steps |
| device_gradients | comparing a device's gradients with the CPU's |
"""
