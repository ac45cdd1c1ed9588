"""Find parameters that a step writes, freezes or unfreezes after it has used them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_unified.nn.module_tree.walks import modules_of, tensors_of
from lightning_unified.step.undo import TRAINING_STEP
from lightning_unified.step.undo.functions import names_in, reached_functions

__all__ = ["NotedShards", "UsedWeights", "names_of_step", "used_otherwise"]

_LISTS = frozenset({"parameters", "named_parameters", "_parameters"})
_WIDE = frozenset({torch.float32, torch.float64})
_FORMATS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # 16-bit norms are too coarse
_PROJECTED = 3e-6  # of a norm: `weight / (weight.norm() + 1e-6)` moves a projected weight again
_ROUNDING = 4  # rounding steps of a norm: a step may change weights for one pass, and change them back


class UsedWeights:
    """Notes the trained parameters inside the block, when they are first used.

    Those of a layer are used when its first forward pass ends. Those of the module itself, such as a temperature, are used in an operation, and so are those
    of a layer of which the step takes the weights or calls another method than `forward`.

    A whole batch's step writes them once, after its forward pass: weight clipping, a projection, an optimizer in a gradient hook that writes
    `.data`. A split batch would compute its later micro-batches with the written weights. Writes before a layer's forward pass, such as a
    normalization of prototypes, are the same for each micro-batch if they do nothing the second time. So is a change for one pass that the
    step takes back: a reference's weights in place of the policy's, a discriminator that is frozen while the generator trains.

    Args:
        module: The module whose step runs.
        is_whole: Whether parameters are whole. Otherwise only their `requires_grad` is noted: `NotedShards` compares the values.
        named: The names in the step's code, by `names_of_step`.
    """

    def __init__(self, module: nn.Module, *, is_whole: bool, named: frozenset[str]) -> None:
        self._module, self._is_whole, self._named = module, is_whole, named
        self._handles: list[Any] = []
        self._others, self._modes = _FirstUses(), ExitStack()
        self._used: dict[nn.Module, tuple[list[Tensor], list[Tensor]]] = {}
        self._trained: dict[nn.Module, list[bool]] = {}
        self._switches_before: dict[int, bool] = {}
        self._norms_before: dict[int, float] = {}
        self._watched: list[Tensor] = []

    def __enter__(self) -> Self:
        parameters = tensors_of(self._module)[0]
        self._switches_before = {id(one): one.requires_grad for one in parameters}
        with suppress(NotImplementedError, RuntimeError, TypeError):  # a tensor subclass may have no norm
            own = list(filter(_is_trained, parameters)) if self._is_whole else []
            self._norms_before = dict(zip(map(id, own), _numbers(_norms(own)), strict=True))
            self._watched = own
            alone = _used_by_operations(self._module, self._named)
            self._others.watch(one for one in own if id(one) in alone)
        if self._others.watches:  # else operations run as they do outside, down to the places that warnings name
            self._modes.enter_context(self._others)
        for layer in modules_of(self._module):
            # an embedding with max_norm writes in each pass, and TorchScript takes no hooks
            if _own(layer) and not getattr(layer, "max_norm", None) and not isinstance(layer, torch.jit.ScriptModule):
                self._handles.append(layer.register_forward_hook(self._note))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._modes.close()
        for handle in self._handles:
            handle.remove()

    def _note(self, layer: nn.Module, _arguments: Any, _result: Any) -> None:
        if layer in self._trained:
            return
        held = _own(layer)
        # `torch.func.functional_call` puts other tensors in their place for a call
        if all(isinstance(one, nn.Parameter) for one in held):
            self._trained[layer] = [one.requires_grad for one in held]
            with suppress(NotImplementedError, RuntimeError, TypeError):  # a tensor subclass may have no norm
                own = list(filter(_is_trained, held)) if self._is_whole else []
                self._used[layer] = own, _norms(own)  # on the device: nothing waits for it

    @property
    def switched(self) -> Tensor | None:
        """A parameter that was frozen or unfrozen since, for longer than the step; None without one."""
        for layer, before in self._trained.items():
            for parameter, was in zip(_own(layer), before, strict=False):
                if parameter.requires_grad not in (was, self._switches_before.get(id(parameter))):
                    return parameter
        return None

    @property
    def _used_alone(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters that operations have used, but no call of their layers."""
        known = {id(one) for own, _ in self._used.values() for one in own}
        return [pair for pair in self._others.found if id(pair[0]) not in known]

    @property
    def _first(self) -> list[tuple[Tensor, Tensor]]:
        """All parameters that were used, each with its norm then."""
        layers = (zip(own, norms, strict=True) for own, norms in self._used.values())
        return [*chain.from_iterable(layers), *self._used_alone]

    @property
    def first_norms(self) -> list[tuple[Tensor, float]]:
        """The parameters that were written before their first use, each with its norm then."""
        known = [pair for pair in self._first if id(pair[0]) in self._norms_before]
        numbers = _numbers([norm for _, norm in known])
        pairs = zip([one for one, _ in known], numbers, strict=True)
        return [(one, norm) for one, norm in pairs if _differ(one, self._norms_before[id(one)], norm)]

    @property
    def written(self) -> Tensor | None:
        """A parameter that was written since, for longer than the step; None without one."""
        used = self._first
        changed = list(_changed([one for one, _ in used], _numbers([norm for _, norm in used])))
        # no norm is -1: a parameter whose norm before the step is unknown has changed
        return next(_changed(changed, [self._norms_before.get(id(one), -1.0) for one in changed]), None)

    @property
    def moved(self) -> list[Tensor]:
        """The parameters that were written for longer than the step, whether it uses them or not.

        The backward pass is over. A projection, as of prototypes to length 1, may move what is there already a little more.
        """
        before = [self._norms_before[id(one)] for one in self._watched]
        changed = list(_changed(self._watched, before))
        now = _numbers(_norms([one.detach() for one in changed]))
        norms = ((one, self._norms_before[id(one)], norm) for one, norm in zip(changed, now, strict=True))
        return [one for one, was, norm in norms if one.grad is None or abs(norm - was) > _PROJECTED * max(was, norm)]


class _FirstUses(TorchFunctionMode):
    """Notes the norms of parameters when an operation that autograd records first reads them.

    Attributes:
        found: The parameters, each with its norm then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: set[int] = set()
        self.found: list[tuple[Tensor, Tensor]] = []

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Look for uses of these parameters."""
        self._waiting = set(map(id, parameters))

    @property
    def watches(self) -> bool:
        """Whether there is a parameter to look for."""
        return bool(self._waiting)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        # arguments first: most operations have none of the parameters
        if self._waiting and (used := self._used_in(args, kwargs)) and torch.is_grad_enabled() and _reads(func, result):
            self._waiting -= {*map(id, used)}
            self.found += zip(used, _norms(used), strict=True)
        return result

    def _used_in(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Tensor]:
        """Return the parameters to look for among the arguments of an operation."""
        given = (*args, *kwargs.values()) if kwargs else args
        entries = (one if isinstance(one, (list, tuple)) else (one,) for one in given)
        return list({id(one): one for one in chain.from_iterable(entries) if id(one) in self._waiting}.values())


def _reads(func: Any, result: Any) -> bool:
    """Return whether an operation is recorded by autograd and writes nothing in place."""
    name = getattr(func, "__name__", "_")
    writes = (name.endswith("_") and not name.startswith("__")) or name == "__set__"  # "__get__" reads `weight.T`
    results = result if isinstance(result, (list, tuple)) else (result,)
    return not writes and any(isinstance(one, Tensor) and one.requires_grad for one in results)


class NotedShards:
    """The trained rows of this rank, before a step.

    They may not be written in the step at all: which rank's pass has used them cannot be told.

    Args:
        parameters: The parameters of the step.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._own = [one for one in parameters if one.requires_grad and _rows(one).numel()]
        self._before = _numbers(_norms([_rows(one) for one in self._own]))

    @property
    def written(self) -> Tensor | None:
        """A parameter that was written since; None without one."""
        return next(_changed(self._own, self._before), None)


def used_otherwise(loss: Tensor, parameters: Iterable[Tensor]) -> Tensor | None:
    """Return a parameter that another operation than an embedding uses; None without one.

    Args:
        loss: The loss, whose graph holds the operations.
        parameters: The parameters to look for.
    """
    sought = {id(one): one for one in parameters}
    waiting = [loss.grad_fn] if sought else []
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions if node is not None else ():
            used = sought.get(id(getattr(following, "variable", None)))
            if used is not None and node is not None and not node.name().startswith("Embedding"):
                return used
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return None


def _changed(parameters: Sequence[Tensor], before: Sequence[float]) -> Iterator[Tensor]:
    """Yield the parameters whose norms are no longer those of `before`."""
    now = _numbers(_norms([_rows(one) for one in parameters]))
    for parameter, was, norm in zip(parameters, before, now, strict=True):
        if _differ(parameter, was, norm):
            yield parameter


def _differ(parameter: Tensor, one: float, other: float) -> bool:
    """Return whether two norms of a parameter differ by more than rounding."""
    eps = torch.finfo(torch.float64 if parameter.dtype == torch.float64 else torch.float32).eps
    return abs(other - one) > _ROUNDING * eps * max(abs(one), abs(other))


def _rows(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def names_of_step(module: nn.Module) -> frozenset[str]:
    """Return the names in the code that a training step may run."""
    return names_in(reached_functions(module, TRAINING_STEP))


def _used_by_operations(module: nn.Module, named: frozenset[str]) -> set[int]:
    """Return the ids of the parameters whose use no call of a layer may tell.

    They are those of the module itself, of parameter lists, and all with a name that the step's code has, as in `F.linear(x, self.head.weight)`.
    They are all parameters where this code asks for them by `parameters()`.
    """
    kinds = (nn.ParameterList, nn.ParameterDict)
    if named & _LISTS:
        return set(map(id, tensors_of(module)[0]))
    return {
        id(parameter)
        for owner in modules_of(module)
        for name, parameter in owner._parameters.items()
        if name in named or owner is module or isinstance(owner, kinds)
    }


def _own(layer: nn.Module) -> list[Tensor]:
    return [one for one in layer._parameters.values() if one is not None]


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad and not parameter.is_meta and bool(parameter.numel())


def _norms(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the norms of parameters, each on its device."""
    tensors = [one.detach() for one in parameters]
    if tensors and all(type(one) is Tensor and one.is_cpu and one.dtype in _WIDE for one in tensors):
        return [*torch._foreach_norm(tensors)]  # pyright: ignore[reportPrivateImportUsage]
    norms = [torch.linalg.vector_norm(one, dtype=_FORMATS.get(one.dtype)) for one in tensors]
    return [norm if type(norm) is Tensor else torch.tensor(float(norm)) for norm in norms]


def _numbers(norms: Sequence[Tensor]) -> list[float]:
    """Return norms as numbers, with one transfer from each device."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, norm in enumerate(norms):
        alike.setdefault((norm.device, norm.dtype), []).append(index)
    numbers = {}
    for indices in alike.values():
        numbers.update(zip(indices, torch.stack([norms[index] for index in indices]).tolist(), strict=True))
    return [numbers[index] for index in range(len(norms))]
