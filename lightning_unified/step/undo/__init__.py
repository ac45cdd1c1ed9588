"""Undo: record the state that a step may change, and restore it after a failure or a trial.

A step that ran out of memory is repeated with smaller micro-batches. The repeated step must start from the same state as the
first one. The step may change any object that it can reach, so all of them are recorded before it runs:

1. *Roots*: the module, the user's callbacks, optimizer options, schedulers, variables that the step's functions name, and attributes of
   classes (`roots`, `functions`, `names`).
2. *Walk*: from the roots through submodules, containers and plain objects, to *cells* and tensors. A cell is an object with contents
   that can be replaced, such as an attribute dict, a list or a closure variable (`walk`, `kinds`, `cells`).
3. *Record*: cells get a shallow copy of their contents. Small tensors are copied. Large ones are guarded by version counter and
   checksum (`watch`, `states`, `tensors`, `plans`). Cells that did not change since the last step keep their copy (`still`).
4. *Restore*: cells get their contents back. Copied tensors are written back in place. Every object keeps its identity (`watch`).

Restored are:

- attributes of the LightningModule and its submodules, of the user's callbacks, and of plain objects that these hold;
- dicts, lists, sets and deques in these attributes, and nested ones;
- buffers, plain tensors, frozen parameters and NumPy arrays that were written in place;
- buffers and attributes of TorchScript modules;
- torchmetrics objects, wherever they are held;
- generators: `random.Random`, `numpy.random.Generator` and `RandomState`, `torch.Generator`; iterators, also of `itertools`
  (`iterators`);
- globals and closure variables that the step's functions name, and the objects in them; attributes of users' classes; closure variables of
  functions that attributes, hooks and globals hold (`functions`);
- attributes of parameters and of the Trainer, queues, and the arguments of `functools.partial`;
- options of parameter groups, attributes of learning rate schedulers, and the batch (`BatchWatch`);
- attributes of data modules, loaders, datasets, samplers and optimizers that the step names, and the state of optimizers if it names
  `optimizers` and `state` (`optimizers`).

Trained parameters, their gradients and otherwise the optimizer's state are recorded elsewhere (`step.recovery`), because they are as large as the
model.

Not restored are:

- trained parameters that a step replaces by other objects;
- state that only functions reach which `functions` does not find;
- objects of Lightning, torch and the standard library;
- files, sockets, other processes' memory, and iterators over files and of a `DataLoader`;
- values inside the entries of containers with more than 1,000 entries; the entries themselves are restored.

Some changes are seen that cannot be restored, and the run stops with an error that names the place: a large tensor that a failed step
wrote for the first time (version counters and checksums show the write), and a draw from a Python generator (a stand-in counts draws).
"""

from lightning_unified.step.undo.roots import EVALUATION_STEPS, TRAINING_STEP, Roots, roots_of
from lightning_unified.step.undo.states import Drawn, no_draws
from lightning_unified.step.undo.watch import BatchWatch, Noted, StateWatch

__all__ = [
    "EVALUATION_STEPS",
    "TRAINING_STEP",
    "BatchWatch",
    "Drawn",
    "Noted",
    "Roots",
    "StateWatch",
    "no_draws",
    "roots_of",
]
