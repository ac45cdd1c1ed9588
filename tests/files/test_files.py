"""Files of weights are read and written as by torch and safetensors, without cached pages."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_unified.files.mapped import giving_back, is_mapped, load_mapped, owned, owned_below
from lightning_unified.files.pages import PIECE, opened_uncached
from lightning_unified.files.safetensors_file import read_header, read_tensor
from lightning_unified.files.written import UncachedFile
from lightning_unified.models.pretrained.streaming import load_weights

MIB = 2**20
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def read(file, **options):
    with opened_uncached(file) as descriptor:
        return {name: read_tensor(descriptor, place, **options) for name, place in read_header(file).items()}


def test_every_dtype_and_shape_is_read_as_it_was_saved(tmp_path):
    saved = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES}
    saved |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "long": torch.randn(PIECE // 4 + 7)}
    save_file(saved, tmp_path / "a.safetensors", metadata={"format": "pt"})
    found = read(tmp_path / "a.safetensors")

    assert found.keys() == saved.keys()
    for name, value in saved.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(found[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)), name


def test_a_tensor_is_converted_piece_by_piece_as_a_whole_one_is(tmp_path):
    value = torch.randn(PIECE // 4 * 2 + 3)
    save_file({"a": value}, tmp_path / "a.safetensors")

    assert torch.equal(read(tmp_path / "a.safetensors", dtype=torch.bfloat16)["a"], value.bfloat16())


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "a header of 0 bytes in a file of 0"),
        (b"\xff" * 20, "a header of .* bytes in a file of 20"),
        ((2).to_bytes(8, "little") + b"[]", "AttributeError|TypeError"),
        ({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}, "dtype F3, which is none of"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "a tensor of 8 bytes at 0 to 4"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "a tensor of 8 bytes at 0 to 8"),
        ({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, "a tensor of 4 bytes"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path, content, why):
    if isinstance(content, dict):
        header = json.dumps(content).encode()
        content = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a\.safetensors cannot be read as a safetensors file: .*({why})"):
        read_header(tmp_path / "a.safetensors")


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path):
    save_file({"a": torch.zeros(100)}, tmp_path / "a.safetensors")
    header = read_header(tmp_path / "a.safetensors")
    with (tmp_path / "a.safetensors").open("rb+") as file:
        file.truncate(300)
    with (
        opened_uncached(tmp_path / "a.safetensors") as descriptor,
        pytest.raises(OSError, match=r"ended .* bytes early"),
    ):
        read_tensor(descriptor, header["a"])


def test_weights_that_were_loaded_are_not_in_the_page_cache(tmp_path, cached, cold):
    module = nn.Linear(1024, 4096)
    save_file(dict(module.named_parameters()), tmp_path / "a.safetensors")
    cold(tmp_path / "a.safetensors")
    before, after = cached(tmp_path / "a.safetensors"), module.weight.clone()
    module.weight = nn.Parameter(torch.empty(4096, 1024, device="meta"))

    assert load_weights(module, tmp_path, dtype=torch.float32) == set()
    assert torch.equal(module.weight, after)
    assert (before, cached(tmp_path / "a.safetensors")) == (0, 0)


@pytest.fixture
def checkpoint(tmp_path):
    state = {"big": torch.randn(3 * PIECE // 4 + 5), "strided": torch.randn(70, 60).t(), "n": 3}
    torch.save({"state_dict": state, "other": [(torch.ones(4), "x")]}, tmp_path / "a.ckpt")
    return state, tmp_path / "a.ckpt"


def test_values_leave_the_page_cache_as_they_are_copied(checkpoint, cached, cold):
    state, path = checkpoint
    cold(path)
    found = load_mapped(path)["state_dict"]
    targets = {name: torch.empty_like(state[name]) for name in ("big", "strided")}
    with giving_back():
        for name, target in targets.items():
            target.copy_(found[name])

    assert all(torch.equal(targets[name], state[name]) for name in targets)
    assert cached(path) < MIB  # of 12: the ends of the file, and pages read ahead
    assert torch.equal(found["big"], state["big"])  # a page that was given back can still be read


def test_moved_and_cloned_values_are_out_of_the_file(checkpoint):
    state, path = checkpoint
    found = load_mapped(path)["state_dict"]["big"]
    with giving_back():
        same, half, cloned = found.to("cpu"), found.to(torch.bfloat16), found.clone()

    assert is_mapped(found)
    assert not any(map(is_mapped, (same, half, cloned)))
    assert torch.equal(same, state["big"])
    assert torch.equal(half, state["big"].bfloat16())
    assert torch.equal(cloned, state["big"])


def test_a_written_value_of_the_mapping_is_the_one_that_is_copied(checkpoint):
    """A hook may change a checkpoint in place before it is loaded."""
    state, path = checkpoint
    found = load_mapped(path)["state_dict"]["big"]
    found.add_(1)
    with giving_back():
        target = torch.empty_like(found).copy_(found)

    assert torch.equal(target, state["big"] + 1)
    assert torch.equal(found, target)


def test_nothing_below_a_value_stays_mapped(checkpoint):
    found = load_mapped(checkpoint[1])
    entry = found["other"][0][0]
    owned_below(found)

    assert is_mapped(entry)
    assert not is_mapped(found["other"][0][0])
    assert torch.equal(found["other"][0][0], torch.ones(4))
    assert found["state_dict"]["n"] == 3


def test_a_tensor_that_is_not_mapped_stays_itself():
    tensor = torch.ones(3)

    assert owned(tensor) is tensor
    with giving_back():
        assert tensor.to("cpu") is tensor


def test_a_file_of_the_old_format_is_read(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "a.ckpt", _use_new_zipfile_serialization=False)

    assert torch.equal(load_mapped(tmp_path / "a.ckpt")["a"], torch.ones(3))


def test_a_file_written_beside_the_cache_is_torchs_own(tmp_path, cached):
    state = {"a": torch.randn(5 * MIB), "b": [torch.ones(2), "x"]}
    torch.save(state, tmp_path / "torch")
    with UncachedFile(tmp_path / "ours") as file:
        torch.save(state, file)  # pyright: ignore[reportArgumentType]

    assert cached(tmp_path / "ours") == 0 < cached(tmp_path / "torch")
    assert torch.equal(torch.load(tmp_path / "ours")["a"], state["a"])
    assert (tmp_path / "ours").stat().st_size == pytest.approx((tmp_path / "torch").stat().st_size, abs=1000)
