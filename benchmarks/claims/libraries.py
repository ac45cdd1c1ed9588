"""Check the statements of docs/lab/claims.md about libraries, loaders and data.

They concern scaler, pinning, processes, numbers, tokens, splits and padding.

    python -m benchmarks.claims.libraries [--output benchmarks/claims/libraries.json]

Needs elm327obd (the `dtc` source); under a minute. For one check of torch's own loader code, torch is made to see that its accelerator
is Metal; nothing else here has to do with a Mac.
"""

import io
import pickle
import random
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import omegaconf
import tokenizers
import torch
import yaml
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.records import record_measures
from lightning_unified.data import TextData
from lightning_unified.data.sources import corpora
from lightning_unified.data.splitting import split
from lightning_unified.data.tokenizer import train_tokenizer


def scaler():
    """What torch's two ways of naming autocast and scaler do on a machine without CUDA."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            torch.cuda.amp.autocast(device_type="mps")  # pyright: ignore[reportCallIssue]
            old_autocast = "accepted"
        except TypeError as error:
            old_autocast = f"TypeError: {error}"
        old = torch.cuda.amp.GradScaler()
        value = torch.tensor(3.0)
        unscaled = old.scale(value).item() == value.item()
        kinds = sorted({warning.category.__name__ for warning in caught})
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    return {
        "torch.cuda.amp.autocast(device_type='mps')": old_autocast,
        "torch.cuda.amp.GradScaler() enabled": old.is_enabled(),
        "its scale() is the identity": unscaled,
        "warnings": kinds,
        "torch.amp.GradScaler('mps') enabled": torch.amp.GradScaler("mps").is_enabled(),
        "operators with an autocast rule": {key: len(registered(f"Autocast{key}")) for key in ("MPS", "CUDA", "CPU")},
    }


class Resident(Dataset):
    """Reports the memory of the process that reads it.

    Bytes: resident, and its own share of mapped pages.
    """

    def __len__(self):
        return 1

    def __getitem__(self, index):
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return kib["Rss"] * 1024, kib["Pss"] * 1024, (kib["Private_Clean"] + kib["Private_Dirty"]) * 1024


def loader():
    """Pinning without CUDA, and memory of one loader process.

    The loader process imports the modules that this script imports.
    """
    found = {}
    for name, accelerator in (("cpu", None), ("with mps as its accelerator", torch.device("mps"))):
        with (
            warnings.catch_warnings(record=True) as caught,
            mock.patch.multiple(
                torch.accelerator,
                is_available=lambda accelerator=accelerator: accelerator is not None,
                current_accelerator=lambda accelerator=accelerator: accelerator,
            ),
        ):
            warnings.simplefilter("always")
            batch = next(iter(DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2, pin_memory=True)))
        texts = [str(warning.message) for warning in caught if "pin" in str(warning.message)]
        found[f"pin_memory=True, {name}"] = {"pinned": batch[0].is_pinned(), "warnings": texts}
    for method in ("fork", "forkserver", "spawn"):
        workers = DataLoader(Resident(), batch_size=None, num_workers=1, multiprocessing_context=method)
        resident, share, private = next(iter(workers))
        found[f"one worker, {method}"] = {"resident_bytes": resident, "share_bytes": share, "private_bytes": private}
    return found


@dataclass
class Pickled:
    width: int = 384


def files():
    """Numbers as PyYAML and OmegaConf parse them; a pickled dataclass in torch.load."""
    buffer = io.BytesIO()
    torch.save(Pickled(), buffer)
    buffer.seek(0)
    try:
        torch.load(buffer)
        loaded = "loaded"
    except pickle.UnpicklingError as error:
        loaded = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    text = "rate: 5e-4\neps: 1e-8\n"
    return {
        "yaml.safe_load": {name: type(value).__name__ for name, value in yaml.safe_load(text).items()},
        "OmegaConf": {name: type(value).__name__ for name, value in omegaconf.OmegaConf.create(text).items()},
        "torch.load of a pickled dataclass": loaded,
    }


def tokenizer():
    """A byte-level BPE learnt from one sentence as the seed does it, and ours from the same."""
    sentence, asked = "The engine loses power under load.", "P0087: Öldruck < 2 bar, 80 °C"
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    steps = [tokenizers.normalizers.NFD(), tokenizers.normalizers.Lowercase(), tokenizers.normalizers.StripAccents()]
    theirs.normalizer = tokenizers.normalizers.Sequence(steps)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = tokenizers.decoders.ByteLevel()
    options = {"vocab_size": 32_000, "min_frequency": 2, "special_tokens": ["<unk>"], "show_progress": False}
    theirs.train_from_iterator([sentence], tokenizers.trainers.BpeTrainer(**options))
    ours = train_tokenizer([sentence], vocab_size=32_000)
    unknown, ids = theirs.token_to_id("<unk>"), theirs.encode(asked).ids
    return {
        "text": asked,
        "seed: unknown tokens": f"{sum(token == unknown for token in ids)} of {len(ids)}",
        "seed: comes back as": theirs.decode(ids),
        "ours: comes back exactly": ours.decode(ours.encode(asked).ids) == asked,
    }


def padding():
    """Share of padding in an epoch of the fault codes.

    Each row is padded to 512, or to the nearest of at most four lengths.
    """
    data = TextData(source="dtc", batch_size=16, sequence_length=512, vocab_size=4096, drop_last=False)
    rows = used = cells = 0
    lengths = set()
    for batch in data.train_dataloader():
        ids = batch["input_ids"]
        rows, used, cells = rows + len(ids), used + int((ids != 0).sum()), cells + ids.numel()
        lengths.add(ids.shape[1])
    return {"rows": rows, "to_512": 1 - used / (512 * rows), "bucketed": 1 - used / cells, "lengths": sorted(lengths)}


def contamination():
    """Share of held-out lines that are also in training, before duplicates are dropped.

    Two splits: line by line (seed 0, a tenth), and by our groups.
    """
    found = {}
    for source in ("pydoc", "dtc"):
        documents = corpora.load(source)
        if source == "dtc":
            records = [document.record for document in documents if document.record is not None]
            lines = [f"{r.symptom}|{r.probable_cause}|{r.solution}".lower() for r in records]
        else:
            lines = [" ".join(line.split()) for document in documents for line in document.text.splitlines()]
            lines = [line for line in lines if line]
        random.Random(0).shuffle(lines)
        held_out = lines[: len(lines) // 10]
        known = set(lines[len(held_out) :])
        parts = split(documents, fraction=0.1, seed=0)
        found[source] = {
            "lines": len(lines),
            "by_row": sum(line in known for line in held_out) / len(held_out),
            "by_group_before_dropping": parts.dropped_lines / parts.validation_lines,
        }
    return found


if __name__ == "__main__":
    sys.exit(
        record_measures("claims.libraries", Path(__file__), (scaler, files, tokenizer, contamination, padding, loader))
    )
