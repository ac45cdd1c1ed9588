"""The second run of a checkpointed block, with the state of its first run, and a comparison.

The backward pass runs a block again to recompute its activations. Gradients are those of the plain block only if both runs compute the
same values. These modules see to that:

| module | subject |
|---|---|
| generators | random generators: torch's own, Python's, NumPy's, and those that a block holds |
| state | attributes, containers and tensors of a block and its arguments, as they were before its first run |
| libraries | which objects are the user's, and which a library's |
| buffers | buffers that a block writes |
| writes | the search for arguments that a block writes in place |
| runs | both runs of one call |
| modes | the dispatch modes of a run |
| outputs | the comparison of both runs' outputs |
| projections | random projections of outputs, which the comparison keeps |
"""
