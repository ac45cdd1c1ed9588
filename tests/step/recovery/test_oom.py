"""One classifier knows every backend's out-of-memory text, and nothing else."""

import errno
import weakref

import pytest
import torch

import lightning_unified
from lightning_unified.errors import OutOfMemoryError
from lightning_unified.hardware.out_of_memory import is_out_of_memory
from lightning_unified.step.recovery.oom import caught, release_cached_memory, requested_bytes

TEXTS = [
    # caching allocators and their drivers
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free.",
    "CUDA error: out of memory",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: out of memory",
    "HIP out of memory. Tried to allocate 2.00 GiB.",
    "HIP error: out of memory",
    "XPU out of memory. Tried to allocate 2.00 GiB.",
    "NPU out of memory. Tried to allocate 2.00 GiB",
    "C10 Out of Memory. Trying to allocate 1073741824 bytes",
    "MPS backend out of memory (MPS allocated: 9.00 GB, other allocations: 1.00 GB, max allowed: 10.67 GB). Tried to allocate 1.00 GB on shared pool.",
    "Error: command buffer exited with error status.\nInsufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    "Invalid buffer size: 5.00 GB",
    "Invalid buffer size: 40.00 GiB",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1131',
    "NvMapMemAllocInternalTagged: 1075072515 error 12",
    "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1073741824 (1024)MB",
    # libraries
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "CUDA error: CURAND_STATUS_ALLOCATION_FAILED when calling `curandCreateGenerator`",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "CUDA error: HIPSPARSE_STATUS_ALLOC_FAILED when calling `hipsparseCreate(handle)`",
    "hipfft error: HIPFFT_ALLOC_FAILED",
    "rocblas error: rocblas_status_memory_error when calling `rocblas_create_handle`",
    "MIOpen Error: miopenStatusAllocFailed",
    "hipErrorOutOfMemory: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY: the driver has none",
    "Triton Error [CUDA]: out of memory",
    "Triton Error [HIP]:  Code: 2, Messsage: out of memory",
    "NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled cuda error, NCCL version 2.21.5\nLast error:\nCuda failure 2 'out of memory'",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)",
    "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)",
    "Native API failed. Native API returns: -4 (PI_ERROR_MEM_OBJECT_ALLOCATION_FAILURE)",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes.",
    "Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21.95G of 15.48G hbm.",
    "Resource exhausted: From /job:tpu_worker/replica:0/task:0:\nAttempting to reserve 3.95G at the bottom of memory. That was not possible.",
    # the host
    "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:76] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    "Caught OSError in DataLoader worker process 0.\nOSError: [Errno 12] Cannot allocate memory",
    "unable to mmap 49907246508 bytes from file </data/a.safetensors>: Cannot allocate memory (12)",
    "unable to allocate shared memory(shm) for file </torch_1_2>: Cannot allocate memory (12)",
    "std::bad_alloc",
    "MKL FFT error: Intel oneMKL DFTI ERROR: Not enough memory to allocate",
    "MKL error: SPARSE_STATUS_ALLOC_FAILED when calling `mkl_sparse_d_create_csr`",
    "could not create a memory object",
    "could not create a memory",
    # wrapped by others
    "Caught OutOfMemoryError in pin memory thread for device 0.\nOriginal Traceback (most recent call last):\n  …\nCUDA out of memory. Tried to allocate 2 MiB",
    "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
]
OTHER_TEXTS = [
    "my replay buffer is out of memory slots",
    "the pool ran out of memory cells",
    "out of memory tokens: raise memory_length",
    "the memory bank has no room: not enough memory entries, 12 of 64",
    "Cannot allocate memory tokens to 3 heads",
    "can't allocate memory slots before setup",
    "Invalid buffer size: expected 5, got 6",
    "buffer size must be positive",
    "could not create a memory descriptor",
    "could not create a primitive descriptor for the matmul primitive",
    "CUDA error: device-side assert triggered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "cuFFT error: CUFFT_INVALID_SIZE",
    "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "RESOURCE_EXHAUSTED: Quota exceeded for requests per minute",
    "unable to mmap 12 bytes from file <a>: Permission denied (13)",
    "NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled system error",
    "Cuda failure 1 'invalid argument'",
    "expected scalar type Half but found Float",
    "mat1 and mat2 shapes cannot be multiplied",
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_backends_text_is_known(text):
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("text", OTHER_TEXTS)
def test_other_texts_on_memory_are_not_taken_for_it(text):
    assert not is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("any text"), OSError(errno.ENOMEM, "fork")])
def test_types_that_mean_it_need_no_text(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        OutOfMemoryError("CUDA out of memory: nothing smaller is left to try"),  # ours is final
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


def test_a_caught_error_is_described_and_its_frames_are_freed():
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


def test_the_classifier_is_public():
    assert lightning_unified.is_out_of_memory is is_out_of_memory and "is_out_of_memory" in lightning_unified.__all__
