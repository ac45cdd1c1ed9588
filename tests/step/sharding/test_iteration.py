"""Our reset of FSDP2's iteration does what torch's does, and drops the gradients that torch's leaves."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning_unified.step.sharding.iteration import (
    accumulate_in_reduced_format,
    hold_whole,
    initialize,
    reset_iteration,
)
from tests.support.lanes import first_cells, some
from tests.support.ranks.processes import on_ranks

PLACES = ("forward", "between passes", "backward", "inside a block")


class Fault(torch.autograd.Function):
    """The identity, whose backward pass fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("a fault")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.fault = nn.Linear(8, 8), nn.Linear(8, 8), ""

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        if self.fault == "forward":
            raise RuntimeError("a fault")
        if self.fault == "inside a block":
            hidden = Fault.apply(hidden)
        out = x + self.second(self.second(hidden))
        return Fault.apply(out) if self.fault == "backward" else out


def built():
    torch.manual_seed(1)
    return nn.Sequential(*[Block() for _ in range(3)]).double()


def sharded(**options):
    net, mesh = built(), init_device_mesh("cpu", (2,))
    for block in net:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    initialize([net])
    return net


def sharded_and_held(**options):
    net = sharded(**options)
    hold_whole([net])
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    return net


def rows():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def fail(net, place):
    loss = net(rows()).square().mean()
    if place == "between passes":
        raise RuntimeError("a fault")
    loss.backward()


def failed(net, place):
    net[1].fault = place
    with pytest.raises(RuntimeError, match="a fault"):
        fail(net, place)
    net[1].fault = ""


def repeated(net):
    for parameter in net.parameters():
        parameter.grad = None
    net(rows()).square().mean().backward()
    return torch.cat([parameter.grad.full_tensor().flatten() for parameter in net.parameters()])


def described(value, depth=0):
    """Return what an object of FSDP2 keeps, without identities."""
    if isinstance(value, (list, tuple, set, dict)):
        return f"{type(value).__name__} of {len(value)}"
    return str(value) if isinstance(value, (bool, int, str, type(None))) or depth == 0 else type(value).__name__


def kept(net):
    state = net._get_fsdp_state()
    owners = [state._comm_ctx, state._state_ctx, *state._state_ctx.all_states]
    owners += [group for one in state._state_ctx.all_states for group in one._fsdp_param_groups]
    left_out = ("_hook_handle", "stream", "device_handle")
    return [
        {name: described(value, 1) for name, value in vars(owner).items() if not name.endswith(left_out)}
        | {"state": str(getattr(owner, "_training_state", "")), "sharded": str(getattr(owner, "_sharded_state", ""))}
        for owner in owners
    ]


def connected(function, *args):
    import os

    torch.distributed.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    return function(*args)


def compared(place):
    ours, theirs = sharded(), sharded()
    for net in (ours, theirs):
        failed(net, place)
    reset_iteration([ours], reshards=True)
    theirs.reset_iter_state()
    return kept(ours), kept(theirs)


def gradients_after_a_reset(place):
    plain, net = built(), sharded()
    plain(rows()).square().mean().backward()
    failed(net, place)
    reset_iteration([net], reshards=True)
    return repeated(net), torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])


def held(place):
    """Return the gradient that whole parameters accumulate after a pass that failed on one rank."""
    net, plain = sharded_and_held(), built()
    if torch.distributed.get_rank():
        failed(net, place)
        for parameter in net.parameters():
            parameter.grad = None
        reset_iteration([net], reshards=False)
    assert not any(isinstance(parameter, DTensor) for parameter in net.parameters())
    for _ in range(2):
        net(rows()).square().mean().backward()
        plain(rows()).square().mean().backward()
    return tuple(torch.cat([one.grad.flatten() for one in module.parameters()]) for module in (net, plain))


def accumulated_in_low_precision():
    """Return the gradients of low-precision parameters; on one rank after a later pass of a window failed."""
    net = sharded_and_held(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    if torch.distributed.get_rank():
        net(rows()).square().mean().backward()
        failed(net, "inside a block")
        for parameter in net.parameters():
            parameter.grad = None
        reset_iteration([net], reshards=False)
    net(rows()).square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


def accumulated_for_a_reduction():
    """Return the gradients of two passes, and those of whole double-precision parameters."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net, plain = sharded_and_held(mp_policy=policy), built()
    accumulate_in_reduced_format([net])
    for _ in range(2):
        net(rows()).square().mean().backward()
        plain(rows()).square().mean().backward()
    return tuple(torch.cat([one.grad.flatten() for one in module.parameters()]) for module in (net, plain))


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="torch before 2.13 has no reset to compare with"
)
@pytest.mark.parametrize("place", some(PLACES, "forward", "backward"))
def test_our_reset_leaves_the_state_that_torchs_leaves(place):
    for ours, theirs in on_ranks(connected, compared, place):
        assert ours == theirs


@first_cells(1, "place", some(PLACES, "backward", "between passes"))
def test_a_step_after_a_reset_has_the_gradients_of_an_undisturbed_one(place):
    for found, plain in on_ranks(connected, gradients_after_a_reset, place):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-14)


@first_cells(1, "place", some(PLACES, "backward", "inside a block"))
def test_a_rank_that_holds_whole_parameters_resets_alone(place):
    for found, plain in on_ranks(connected, held, place):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-14)


def test_gradients_after_a_reset_have_the_precision_of_undisturbed_ones():
    undisturbed, found = on_ranks(connected, accumulated_in_low_precision)
    torch.testing.assert_close(found, undisturbed, rtol=0, atol=0)


def test_whole_gradients_accumulate_in_the_format_of_the_reduction():
    for found, plain in on_ranks(connected, accumulated_for_a_reduction):
        assert found.dtype == torch.float32
        assert (found - plain).norm() < 2e-2 * plain.norm()  # the parameters are bfloat16
