"""A GearHead small enough for tests, its batches and its tokenizer."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lightning_unified.data.documents.record import SPECIAL_TOKENS
from lightning_unified.models.gearhead.module import GearHead

SIZES = {"vocabulary": 300, "positions": 96, "width": 32, "layers": 2, "heads": 4, "feed_forward": 64}


@pytest.fixture
def build():
    """Return a function that builds a tiny GearHead; dropout 0 unless asked for."""

    def make(preset="gearhead-small", **changes):
        torch.manual_seed(3)
        return GearHead(preset=preset, **{**SIZES, "dropout": 0.0, **changes})

    return make


@pytest.fixture
def batch():
    """Return a ragged batch of 5 rows.

    It has padding, two scored spans, codes, and one question a row but the last.
    """
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(9, 300, (5, 12), generator=generator)
    labels, codes = ids.clone(), torch.zeros_like(ids)
    for row, length in enumerate((12, 7, 9, 4, 11)):
        ids[row, length:] = 0
        labels[row, length:] = -100
    labels[0, :6] = -100
    codes[:, 2:4] = torch.randint(1, 10_000, (5, 2), generator=generator)
    diagnosis = torch.full_like(ids, -100)
    diagnosis[:4, 1] = torch.randint(0, 64, (4,), generator=generator)
    return {"input_ids": ids, "labels": labels, "error_code_ids": codes, "diagnosis_labels": diagnosis}


@pytest.fixture(scope="session")
def tokenizer():
    """Return a byte-level tokenizer without merges: 9 special tokens and 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: row for row, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL_TOKENS))
    return made
