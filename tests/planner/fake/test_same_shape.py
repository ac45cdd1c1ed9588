"""Results at other sizes that are computed from one call equal those of torch's own mode."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_unified.planner.fake.cached_mode import CachedFakeMode

aten = torch.ops.aten
SHAPES = ((5, 4), (5, 1), (1, 4), (1, 1), (7,), (2, 3, 4), (2, 0), ())
OPERATIONS = {
    "sum of two dtypes": lambda x: x + x.half(),
    "scalar": lambda x: x * 31.5,
    "integers": lambda x: x.long() / 3,
    "comparison": lambda x: x > 31,
    "transposed": lambda x: x.mT * 32 if x.dim() > 1 else x,
    "one transposed of two": lambda x: x.mT.contiguous().mT + x if x.dim() > 1 else x,
    "broadcast": lambda x: x + x[..., :1] if x.dim() else x,
    "copy": lambda x: x.to(torch.bfloat16).clone(),
    "like": lambda x: torch.zeros_like(x, dtype=torch.int32),
    "kept strides": lambda x: torch.empty_like(x.mT) if x.dim() > 1 else x,
    "product": lambda x: x @ x.mT if x.dim() == 2 else x,
    "half product": lambda x: x.half() @ x.mT.half() if x.dim() == 2 else x,
    "several inputs": lambda x: torch.where(x > 0, x, x * 2),
    "tensor of one number": lambda x: x * torch.empty((), dtype=torch.float64),
}


def looks(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("name", OPERATIONS)
def test_other_shapes_look_as_in_torchs_mode(name):
    operation = OPERATIONS[name]
    for dtype in (torch.float32, torch.float64):
        with FakeTensorMode():
            expected = [looks(operation(torch.empty(shape, dtype=dtype))) for shape in SHAPES]
        with CachedFakeMode():
            assert [looks(operation(torch.empty(shape, dtype=dtype))) for shape in SHAPES] == expected


def test_one_call_stands_for_all_shapes(monkeypatch):
    asked, dispatch = [], FakeTensorMode.dispatch
    monkeypatch.setattr(
        FakeTensorMode, "dispatch", lambda self, func, *rest: asked.append(str(func)) or dispatch(self, func, *rest)
    )
    with CachedFakeMode():
        some = [torch.empty(shape) for shape in ((29, 4), (29, 2), (31, 29))]
        asked.clear()
        for one in some:
            one.mul(29.0)
            one.mm(torch.empty(one.shape[1], 29))

    assert [name for name in asked if "mul" in name or "mm" in name].count("aten.mul.Tensor") <= 1
    assert [name for name in asked if "mm" in name].count("aten.mm.default") <= 1


def test_matrices_that_do_not_fit_are_refused_after_some_that_do():
    with CachedFakeMode():
        torch.empty(3, 4).mm(torch.empty(4, 5))
        with pytest.raises(RuntimeError):
            torch.empty(3, 4).mm(torch.empty(3, 5))
