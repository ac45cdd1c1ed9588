"""Load a trained classifier as plain data, without running code from the file.

An untrained one is an error.
"""

from pathlib import Path

from lightning_unified.models.choices import inference_device
from lightning_unified.models.classifier.module import TextClassifier
from lightning_unified.models.plain_checkpoint import load_weights, read_trained

__all__ = ["load"]


def load(path: str | Path, *, device: str = "auto") -> TextClassifier:
    """Load the classifier in a checkpoint, in eval mode, with labels and tokenizer.

    The encoder's own files are not needed: the checkpoint holds its configuration and all weights.

    Args:
        path: The `.ckpt` file.
        device: "cpu", "cuda", "mps" or "auto": the available accelerator, else the CPU.

    Raises:
        FileNotFoundError: If there is no such file.
        RuntimeError: If it is damaged, belongs to no classifier, was saved before the first training step, or holds no tokenizer;
            or if weights and sizes do not fit together.
    """
    saved = read_trained(path, model="classifier", untrained="its head would answer by chance")
    module = TextClassifier(**saved["hyper_parameters"])
    module.on_load_checkpoint(saved)
    if module.identity.encoder is None:
        raise RuntimeError(f"{path} holds no tokenizer; train with a data module that has one, and it travels along.")
    load_weights(module, saved["state_dict"], path=path)
    return module.to(inference_device(device)).eval()
