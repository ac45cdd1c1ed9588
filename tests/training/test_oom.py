"""One classifier knows every backend's out-of-memory text, and nothing else."""

import errno
import weakref

import pytest
import torch

from lightning_unified.training.oom import caught, is_out_of_memory, release_cached_memory, requested_bytes

TEXTS = [
    "MPS backend out of memory (MPS allocated: 9.00 GB, other allocations: 1.00 GB, max allowed: 10.67 GB). Tried to allocate 1.00 GB on shared pool.",
    "Invalid buffer size: 5.00 GB",
    "HIP out of memory. Tried to allocate 2.00 GiB.",
    "XPU out of memory. Tried to allocate 2.00 GiB.",
    "CUDA error: out of memory",
    "CUDA out of memory. Tried to allocate 20.00 MiB.",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1131',
    "NvMapMemAllocInternalTagged: 1075072515 error 12",
    "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_backends_text_is_known(text):
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("any text"), OSError(errno.ENOMEM, "fork")])
def test_types_that_mean_it_need_no_text(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("expected scalar type Half but found Float"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ValueError("out of memory"),  # a text alone, in an error that no allocator raises
        KeyError("memory"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)


def test_a_real_allocation_that_cannot_be_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)

    assert is_out_of_memory(caught.value)


def test_caches_can_be_released_on_a_machine_without_an_accelerator():
    kept = torch.ones(3)
    release_cached_memory(torch.device("cpu"))

    assert kept.sum() == 3


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of", 5 * 2**29),
        ("MPS backend out of memory (MPS allocated: 9.00 GB). Tried to allocate 256 bytes on shared pool.", 256),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000000 bytes. Error code 12", 8_000_000),
        ("std::bad_alloc", None),
    ],
)
def test_what_was_asked_for_is_read_from_the_text(text, count):
    assert requested_bytes(text) == count


def test_what_is_caught_is_told_and_its_frames_are_gone():
    def asks_too_much():
        large = torch.ones(1000)
        alive.append(weakref.ref(large))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    alive = []
    result, reason = caught(asks_too_much)

    assert result is None
    assert reason == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert alive[0]() is None


def test_what_is_not_about_memory_is_not_caught():
    with pytest.raises(RuntimeError, match="shapes"):
        caught(lambda: (_ for _ in ()).throw(RuntimeError("shapes")))
    assert caught(lambda: 3) == (3, None)
