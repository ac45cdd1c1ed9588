"""Fits of a causal language model on sharded ranks, with the loss in chunks."""

from typing import Any, ClassVar

from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_unified import UnifiedFSDPStrategy
from tests.support.causal_lms import causal_lm
from tests.support.ranks.shard_faults import local_rank
from tests.support.ranks.sharded import Deep, trained

SETTING: dict[str, Any] = {"max_epochs": 1, "gradient_clip_val": 0.05, "accumulate_grad_batches": 2}


class Llama(Deep):
    """A small Llama; the module may keep its logits until the end of the batch."""

    latest: ClassVar["Llama"]

    def __init__(self, *, ranks: int = 1, rank: int = 0, keeps: bool = False) -> None:
        super().__init__(ranks=ranks, rank=rank)
        del self.embed, self.blocks, self.head, self.norm
        self.model = causal_lm("Llama")
        self.keeps, self.kept = keeps, None
        self.kinds: set[str] = set()
        self.read: list[float] = []
        Llama.latest = self

    def loss(self, batch):
        output = self.model(input_ids=batch["tokens"], labels=batch["tokens"])
        if self.training:
            self.kinds.add(type(output.logits).__name__)
            self.kept = output.logits if self.keeps else None
        return output.loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.kept is not None:
            self.read.append(float(self.kept.detach().square().sum()))
            self.kept = None


class HeadApart(Llama):
    """Its output layer is gathered for its own forward only."""

    def configure_model(self):
        if not isinstance(self, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.model.lm_head, mesh=mesh)
            fully_shard(self, mesh=mesh)


def alone(*, keeps: bool = False) -> dict[str, Any]:
    """Return the fit of one process, with whole logits."""
    return _found(trained("auto", ranks=1, rank=0, kind=Llama, module={"keeps": keeps}, **SETTING))


def chunked(hold: str, kind: type[Llama], micro_batch_size: Any, keeps: bool) -> dict[str, Any]:
    """Return this rank's fit, with the loss in chunks of 8 rows."""
    strategy: Any = UnifiedFSDPStrategy(
        hold=hold, loss_chunk=8, micro_batch_size=micro_batch_size, budget="6GiB", predict=False
    )
    return _found(trained(strategy, ranks=2, rank=local_rank(), kind=kind, module={"keeps": keeps}, **SETTING))


def _found(fit: dict[str, Any]) -> dict[str, Any]:
    return {**fit, "kinds": Llama.latest.kinds, "read": Llama.latest.read}
