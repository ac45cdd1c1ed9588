"""Fine-tune causal language models on your text: data, training, chat, evaluation, export."""

from typing import TYPE_CHECKING

from lightning_unified.models import lazy_exports

if TYPE_CHECKING:
    from lightning_unified.models.finetune.data.finetune_data import FinetuneData
    from lightning_unified.models.finetune.module import Finetune

__all__ = ["Finetune", "FinetuneData"]

__getattr__ = lazy_exports(__name__, {"Finetune": "module", "FinetuneData": "data.finetune_data"})
