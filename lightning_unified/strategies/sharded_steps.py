"""Steps of a module whose parameters FSDP2 shards."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import lightning as L
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_unified.errors import ConfigurationError
from lightning_unified.step.sharding.kept_shards import KeptShards
from lightning_unified.step.sharding.lockstep import inside_root
from lightning_unified.step.sharding.shards import WholeShards
from lightning_unified.step.sharding.update import ShardedUpdate
from lightning_unified.strategies.ranked import RankedBase

__all__ = ["ShardedSteps"]


class ShardedSteps(RankedBase):
    """Runs training and evaluation steps on whole parameters or on shards, as the ranks hold them."""

    _shards: WholeShards | KeptShards | None

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._gather()

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._gather()

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._gather()

    def _gather(self) -> None:
        """Make parameters whole for an evaluation, in which each rank may repeat its own batches."""
        if isinstance(self._shards, WholeShards):
            with self.ranks.reporting_errors():
                self._shards.gather()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._release()

    @override
    def on_test_end(self) -> None:
        super().on_test_end()
        self._release()

    @override
    def on_predict_end(self) -> None:
        super().on_predict_end()
        self._release()

    def _release(self) -> None:
        """Give back whole parameters after an evaluation, so that hooks between batches find the trained ones."""
        if isinstance(self._shards, WholeShards):
            self._shards.release()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._stepped("training_step", self.precision_plugin.train_step_context(), args, kwargs)

    def _stepped(self, name: str, context: AbstractContextManager[Any], args: Any, kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        method = getattr(module, name)
        with context:
            if isinstance(self._shards, KeptShards):
                return _of_whole(inside_root(module, method, *args, **kwargs), name)
            return method(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._evaluation_step, "validation_step")
        return self._evaluated(call, args, kwargs, phase="validation")

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(partial(self._evaluation_step, "test_step"), args, kwargs, phase="test")

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(partial(self._evaluation_step, "predict_step"), args, kwargs, phase="predict")

    def _evaluation_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        contexts = {
            "validation_step": self.precision_plugin.val_step_context,
            "test_step": self.precision_plugin.test_step_context,
            "predict_step": self.precision_plugin.predict_step_context,
        }
        return self._stepped(name, contexts[name](), args, kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: L.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step as Lightning does, and let the ranks meet before the first written weight."""
        assert isinstance(self._loop, ShardedUpdate)
        module: Any = model or self.lightning_module
        wrapped = partial(self.precision_plugin._wrap_closure, module, optimizer, closure)
        return optimizer.step(closure=self._loop.updating(wrapped), **kwargs)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        assert isinstance(self._loop, ShardedUpdate)
        if clip_val > 0:
            self._loop.clip_by_norm(optimizer, float(clip_val))


def _of_whole(result: Any, step: str) -> Any:
    """Return the result of a step, unless it has computed its loss with shards.

    Raises:
        ConfigurationError: If it has.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if isinstance(loss, DTensor):
        raise ConfigurationError(
            f'{step} uses parameters outside of their modules\' forward, as a penalty of all weights does. With hold="shards" they are '
            'shards there, and the loss cannot be differentiated; give hold="parameters", or weight_decay of the optimizer.'
        )
    return result
