"""Let optimizers of fake parameters choose the kernel they would choose on the target.

An optimizer with neither `foreach` nor `fused` set updates all parameters at once on CUDA, with one more copy of them as
temporaries, and one after the other on a CPU and on MPS. It decides by the device and class of each parameter, and fake
parameters have other ones. Source: `_default_to_fused_or_foreach` in torch's `optim/optimizer.py`, and the lists in
`utils/_foreach_utils.py`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch.optim.optimizer as optimizers
import torch.utils._foreach_utils as foreach
from torch._subclasses.fake_tensor import FakeTensor

from lightning_unified.cost_model.backends.patching import replaced

__all__ = ["optimizer_kernels"]

_FOREACH = ("cuda", "rocm")


@contextmanager
def optimizer_kernels(backend: str) -> Iterator[None]:
    """Make optimizers choose their kernel as on `backend`, whatever device the parameters are on."""
    devices = ["cuda", "cpu"] if backend in _FOREACH else []
    classes = [*optimizers._foreach_supported_types, FakeTensor]
    with ExitStack() as stack:
        for owner in (optimizers, foreach):
            stack.enter_context(replaced(owner, "_get_foreach_kernels_supported_devices", lambda: list(devices)))
            stack.enter_context(replaced(owner, "_foreach_supported_types", classes))
        yield
