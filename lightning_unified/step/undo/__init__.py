"""Undo: the state that a step may change, noted before the step and put back after it failed or was only tried.

Put back are, with the identity of every object kept:

- attributes of the LightningModule and its submodules, of the user's callbacks, and of plain objects that these hold; the dicts,
  lists, sets and deques among them, and nested ones;
- buffers, plain tensors, frozen parameters and NumPy arrays that were written in place;
- torchmetrics objects, wherever they are held;
- generators: `random.Random`, `numpy.random.Generator` and `RandomState`, `torch.Generator`; iterators over sequences, `itertools`;
- globals and closure variables that the step's methods name, and the objects in them;
- options of parameter groups, attributes of learning rate schedulers, and the batch.

Trained parameters, their gradients and the optimizer's state have their own keepers.

Not put back are: trained parameters that a step exchanges for other objects, state that only functions reach which the step calls,
attributes of classes, objects of Lightning, torch and the standard library, Python generators and iterators over files, files, sockets,
and what other processes hold. Entries of containers with more than 1,000 entries are put back, but not what these entries hold.

A large tensor that a failed step wrote for the first time cannot be put back. Version counters and checksums tell; the run is then
refused by the tensor's name.
"""

from lightning_unified.step.undo.batches import BatchWatch
from lightning_unified.step.undo.roots import EVALUATION_STEPS, TRAINING_STEP, Roots, roots_of
from lightning_unified.step.undo.watch import Noted, StateWatch

__all__ = ["EVALUATION_STEPS", "TRAINING_STEP", "BatchWatch", "Noted", "Roots", "StateWatch", "roots_of"]
