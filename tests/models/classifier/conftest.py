"""A tiny classifier, a ragged batch, a tokenizer, and data.

The data offers the properties that the classifier takes over.
"""

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader

from lightning_unified.models.classifier.module import TextClassifier

WORDS = [f"{letter}{index}" for letter in "abc" for index in range(6)]
NAMES = ["apples", "bears", "clouds"]


@pytest.fixture(scope="session", autouse=True)
def _needs_transformers():
    pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def tokenizer():
    """Return a tokenizer of words, with BERT's special tokens around each text."""
    rows = {token: row for row, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    made = Tokenizer(models.WordLevel(rows, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return made


@pytest.fixture(scope="session")
def texts():
    """Return 24 texts of 2 to 9 words and their classes: which letter begins most of the words."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for row in range(24):
        count = 2 + row % 8
        numbers = torch.randint(0, 6, (count,), generator=generator).tolist()
        made.append((" ".join(f"{'abc'[row % 3]}{number}" for number in numbers), row % 3))
    return made


@pytest.fixture(scope="session")
def batches(tokenizer, texts):
    """Return the texts as batches of 6, each padded to 4, 8 or 12 tokens, rows by length."""
    rows = sorted(((tokenizer.encode(text).ids, label) for text, label in texts), key=lambda row: len(row[0]))
    made = []
    for start in range(0, len(rows), 6):
        part = rows[start : start + 6]
        length = next(fixed for fixed in (4, 8, 12) if fixed >= max(len(ids) for ids, _ in part))
        ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in part])
        made.append({"input_ids": ids, "attention_mask": ids != 0, "labels": torch.tensor([y for _, y in part])})
    return made


class Data(LightningDataModule):
    """What the classifier takes over from data, and nothing else."""

    def __init__(self, batches, tokenizer):
        super().__init__()
        self.batches, self.tokenizer = batches, tokenizer
        self.label_names, self.padded_lengths, self.text_length = NAMES, [4, 8, 12], 12
        self.class_counts = torch.cat([batch["labels"] for batch in batches]).bincount(minlength=3).tolist()

    def train_dataloader(self):
        return DataLoader(self.batches, batch_size=None)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.fixture
def data(batches, tokenizer):
    return Data(batches, tokenizer)


@pytest.fixture
def build():
    """Return a function that builds the tiny classifier, with fixed weights and no dropout."""

    def make(**changes):
        torch.manual_seed(3)
        return TextClassifier(
            **{"preset": "classifier-tiny", "dropout": 0.0, "learning_rate": 3e-3, "schedule": "constant", **changes}
        )

    return make


@pytest.fixture
def fit(tmp_path):
    """Return a function that trains for a few steps on the CPU and returns the Trainer."""

    def run(model, data, *, ckpt_path=None, **options):
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "max_steps": 4}
        quiet |= {
            "accelerator": "cpu",
            "enable_checkpointing": False,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
        }
        trainer = Trainer(default_root_dir=tmp_path, **{**quiet, **options})
        trainer.fit(model, data, ckpt_path=ckpt_path, weights_only=None)
        return trainer

    return run


@pytest.fixture(scope="session")
def trained(batches, tokenizer, tmp_path_factory):
    """Return a trained classifier in a checkpoint, with its data, for everybody who only looks."""
    torch.manual_seed(3)
    model = TextClassifier(preset="classifier-tiny", dropout=0.0, learning_rate=3e-3, schedule="constant")
    folder = tmp_path_factory.mktemp("classifier")
    trainer = Trainer(
        default_root_dir=folder,
        max_steps=24,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=6,
    )
    trainer.fit(model, Data(batches, tokenizer))
    path = folder / "last.ckpt"
    trainer.save_checkpoint(path)
    return path
