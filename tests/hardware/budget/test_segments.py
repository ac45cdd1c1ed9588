"""Segments of CUDA's allocator expand on cards, beside the user's own settings."""

from types import SimpleNamespace

import pytest
import torch

from lightning_unified.hardware.environment.segments import expand_segments, segments_expand
from lightning_unified.step.recovery.budget_watch import BudgetWatch

CUDA, ANY, ON = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "expandable_segments:True"


@pytest.fixture
def card(machine):
    def make(name="rtx4090", **environ):
        sources = machine(name, environ=environ)
        sources.torch.written = []
        sources.torch._C = SimpleNamespace(_accelerator_setAllocatorSettings=sources.torch.written.append)
        return sources

    return make


@pytest.mark.parametrize(
    ("environ", "written"),
    [
        ({}, ON),
        (
            {CUDA: "max_split_size_mb:128, garbage_collection_threshold:0.8"},
            f"max_split_size_mb:128,garbage_collection_threshold:0.8,{ON}",
        ),
        ({ANY: "backend:native"}, f"backend:native,{ON}"),
    ],
)
def test_it_is_set_beside_the_users_own_settings(card, environ, written):
    sources = card(**environ)

    assert not segments_expand(sources=sources)
    assert expand_segments("cuda:0", sources=sources)
    assert sources.torch.written == [written]


@pytest.mark.parametrize("variable", [CUDA, ANY])
def test_the_users_own_choice_stays(card, variable):
    on, off = card(**{variable: ON}), card(**{variable: "expandable_segments:False"})

    assert segments_expand(sources=on)
    assert expand_segments("cuda:0", sources=on)
    assert not expand_segments("cuda:0", sources=off)
    assert on.torch.written == off.torch.written == []


@pytest.mark.parametrize(
    ("name", "device", "environ"),
    [
        ("rx6750xt", "cuda:0", {}),
        ("strix_halo", "cuda:0", {}),
        ("gb10", "cuda:0", {}),
        ("jetson", "cuda:0", {}),
        ("rtx4090", "cpu", {}),
        ("rtx4090", "cuda:0", {CUDA: "backend:cudaMallocAsync"}),
    ],
)
def test_other_devices_and_allocators_are_left_alone(card, name, device, environ):
    sources = card(name, **environ)

    assert not expand_segments(device, sources=sources)
    assert sources.torch.written == []


def test_wsl_and_torch_without_the_function_are_left_alone(card):
    wsl, old = card(), card()
    (wsl.proc / "version").write_text("Linux version 5.15.153.1-microsoft-standard-WSL2")
    del old.torch._C._accelerator_setAllocatorSettings

    assert not expand_segments("cuda", sources=wsl)
    assert not expand_segments("cuda", sources=old)


def test_a_run_expands_its_segments_once(card):
    watch, sources, emptied = BudgetWatch("8GiB"), card(), []
    sources.torch.cuda.empty_cache = lambda: emptied.append(1)
    watch._elsewhere, watch.device = {"sources": sources}, torch.device("cuda")
    found = [watch.expand_segments(), watch.expand_segments()]

    assert found == [True, False]
    assert watch.expands
    assert emptied == [1]  # so that no later tensor lies in an old segment
