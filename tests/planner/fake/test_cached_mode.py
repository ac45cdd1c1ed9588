"""Fakes that are remembered are those that torch's own mode makes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_unified.planner.fake.cached_mode import CachedFakeMode


def looks(tensors):
    tensors = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
    return [None if one is None else (type(one), one.shape, one.stride(), one.dtype, one.device) for one in tensors]


OPERATIONS = (
    lambda x: x.t().mul(2.0),
    lambda x: torch.mm(x, x.t().half().float()),
    lambda x: x[1:].contiguous(),
    lambda x: torch.native_layer_norm(x, (4,), None, None, 1e-5),
    lambda x: torch.ops.aten.native_dropout(x, 0.1, True),
    lambda x: torch._foreach_add([x, x[0]], 1.0),
    lambda x: x.clone().add_(1).unsqueeze_(0),
    lambda x: x.expand(3, 2, 4).reshape(6, 4),
    lambda x: torch.ops.aten._unsafe_view(x, [8]),
    lambda x: torch.where(x > 0, x, 0),
    lambda x: x.new_zeros(3, device="cpu"),
    lambda x: torch.full((2,), 3),
    lambda x: torch.complex(x, x).conj().real,
    lambda x: x.sum(dim=0, dtype=torch.float64).split(2),
    lambda x: torch.cat((torch.tensor([]), -x.t()[1:], x.t()[:1]), dim=-1 if x.dim() < 2 else 0),
    lambda x: x.expand(3, 2, 4).transpose(0, 1) * x[0].double() + torch.tensor(2.0),
    lambda x: x.t().to(torch.bfloat16).mean((0,), keepdim=True),
    lambda x: x.t()[1:].detach().requires_grad_().sum().add(x[0, 0]),
    lambda x: torch._foreach_norm([x, x.half()]),
    lambda x: torch._foreach_addcmul_([x], [x], [x], 0.5) or x,
    lambda x: torch.nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_remembered_looks_as_what_torchs_mode_makes(operation):
    with FakeTensorMode():
        expected = looks(operation(torch.empty(2, 4)))
    with CachedFakeMode():
        x = torch.empty(2, 4)
        assert [looks(operation(x)) for _ in range(3)] == [expected] * 3


def test_torchs_mode_is_asked_once_for_each_kind_of_arguments(monkeypatch):
    asked, dispatch = [], FakeTensorMode.dispatch
    monkeypatch.setattr(
        FakeTensorMode, "dispatch", lambda self, func, *rest: asked.append(str(func)) or dispatch(self, func, *rest)
    )
    with CachedFakeMode():
        wide, narrow = torch.empty(23, 4), torch.empty(23, 2)
        asked.clear()
        for _ in range(3):
            wide.cumsum(0), narrow.cumsum(0), wide.add_(23.0), wide.t()

    asked = [name for name in asked if not name.startswith("prim.")]
    assert asked == ["aten.cumsum.default", "aten.cumsum.default", "aten.add_.Tensor"]


def test_what_is_remembered_lives_by_itself_and_what_is_viewed_does_not():
    with CachedFakeMode():
        x = torch.empty(2, 4)
        sums = [x + 1.0 for _ in range(3)]

        assert len({one.untyped_storage()._cdata for one in (x, *sums)}) == 4
        assert x.t().untyped_storage()._cdata == x.add_(1).untyped_storage()._cdata == x.untyped_storage()._cdata
