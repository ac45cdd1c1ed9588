"""Settings of a run on each machine."""

from dataclasses import asdict, fields
from typing import Any

import pytest
import torch

from lightning_unified.errors import HardwareError
from lightning_unified.hardware import HardwareSettings, capabilities, host_threads, read


def resolve(sources, **written):
    reading = read(sources=sources)
    return HardwareSettings(**written).resolve(reading, capabilities(reading, sources=sources), sources=sources)


def test_nothing_but_the_precision_policy_stays_auto(any_machine):
    settings = asdict(resolve(any_machine, name="here"))

    assert [name for name, value in settings.items() if value == "auto"] == ["precision"]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_dataloader_can_be_made_of_the_settings_of_every_machine(any_machine):
    settings = asdict(resolve(any_machine))
    arguments: dict[str, Any] = {
        name: settings[name] for name in ("num_workers", "persistent_workers", "prefetch_factor")
    }

    loader = torch.utils.data.DataLoader(range(1), multiprocessing_context=settings["start_method"], **arguments)  # pyright: ignore[reportArgumentType]
    assert loader.num_workers == settings["num_workers"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "rtx4090",
            {
                "accelerator": "cuda",
                "num_workers": 2,
                "pin_memory": True,
                "start_method": "forkserver",
                "optimizer_kernel": "fused",
            },
        ),
        ("t4", {"accelerator": "cuda", "num_workers": 2}),
        ("gb10", {"accelerator": "cuda", "num_workers": 0, "pin_memory": False, "host_threads": 20}),
        ("jetson", {"accelerator": "cuda", "num_workers": 0, "pin_memory": False}),
        ("strix_halo", {"accelerator": "cuda", "num_workers": 0, "pin_memory": False}),
        ("rx6750xt", {"accelerator": "cuda", "num_workers": 2, "pin_memory": True}),
        (
            "m1",
            {
                "accelerator": "mps",
                "num_workers": 0,
                "start_method": None,
                "prefetch_factor": None,
            },
        ),
        (
            "m4_pro",
            {"accelerator": "mps", "num_workers": 0, "start_method": None, "pin_memory": False, "host_threads": 10},
        ),
        ("lunar_lake", {"accelerator": "cpu"}),
        ("cgroup_v1", {"accelerator": "cpu", "num_workers": 0, "host_threads": 2, "persistent_workers": False}),
        ("cgroup_v2", {"accelerator": "cpu", "num_workers": 0, "host_threads": 4, "start_method": None}),
    ],
)
def test_each_machine_is_used_as_its_memory_and_cores_suggest(machine, name, expected):
    settings = asdict(resolve(machine(name)))

    assert {key: settings[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "work", "rows_gib", "count", "reason"),
    [
        ("m4_pro", "gather", 0, 0, "processes by spawn would share the model's"),
        ("m4_pro", "compute", 0, 4, "have room for four"),
        ("m4_pro", "unknown", 0, 2, "two share 48.00 GiB with the model"),
        ("m4_pro", "compute", 1, 2, "each process by spawn takes 1.15 GiB, and 2 of them keep within 5%"),
        ("m4_pro", "compute", 4, 0, "takes 4.15 GiB, and 0 of them"),
        ("m2", "compute", 0, 2, "two share 16.00 GiB"),
        ("m1", "compute", 0, 0, "they share 8.00 GiB with the model"),
        ("jetson", "compute", 0, 4, "have room for four"),
        ("rtx4090", "gather", 0, 2, "two processes keep up with the card"),
        ("rtx4090", "compute", 0, 8, "half of the cores"),
        ("cgroup_v2", "compute", 0, 1, "one beside a training process on 4 cores"),
        ("cgroup_v1", "compute", 0, 0, "all 2 cores train"),
        ("cgroup_v2", "gather", 0, 0, "all cores train"),
    ],
)
def test_loader_processes_follow_machine_and_data_and_say_why(machine, name, work, rows_gib, count, reason):
    sources = machine(name)
    found = HardwareSettings().workers(read(sources=sources), sources=sources, work=work, rows_bytes=rows_gib * 2**30)

    assert found.count == count
    assert reason in found.reason


def test_forked_processes_share_the_rows(machine):
    sources = machine("gb10")
    workers = HardwareSettings(start_method="fork").workers(
        read(sources=sources), sources=sources, work="compute", rows_bytes=20 * 2**30
    )

    assert workers.count == 4


def test_a_number_that_was_asked_for_is_the_reason_itself(machine):
    sources = machine("m1")
    workers = HardwareSettings(num_workers=3).workers(read(sources=sources), sources=sources)

    assert (workers.count, workers.reason) == (3, "hardware.num_workers=3")


def test_what_is_written_is_kept(machine):
    written = {
        "name": "mine",
        "accelerator": "cpu",
        "precision": "32-true",
        "num_workers": 3,
        "persistent_workers": False,
        "prefetch_factor": 4,
        "pin_memory": False,
        "start_method": "spawn",
        "host_threads": 1,
        "optimizer_kernel": "forloop",
    }

    assert asdict(resolve(machine("rtx4090"), **written)) == written
    assert set(written) == {field.name for field in fields(HardwareSettings)}


def test_without_loader_processes_what_needs_them_goes(machine):
    settings = resolve(
        machine("rtx4090"), num_workers=0, persistent_workers=True, prefetch_factor=4, start_method="spawn"
    )

    assert (settings.persistent_workers, settings.prefetch_factor, settings.start_method) == (False, None, None)


@pytest.mark.parametrize(("name", "kernel"), [("rtx4090", "foreach"), ("m4_pro", "forloop")])
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_fp16_goes_without_fused_kernels(machine, name, kernel, precision):
    """Lightning refuses gradient clipping beside a fused optimizer with a scaler."""
    assert resolve(machine(name), precision=precision).optimizer_kernel == kernel
    assert resolve(machine(name), precision="bf16-mixed").optimizer_kernel == "fused"


def test_host_threads_are_performance_cores_on_a_mac(machine):
    assert host_threads(machine("m4_pro")) == 10


def test_host_threads_keep_within_a_cgroups_quota(machine):
    assert host_threads(machine("cgroup_v1")) == 2
    assert host_threads(machine("cgroup_v2")) == 4


def test_host_threads_are_never_below_one(machine):
    assert host_threads(machine("bare")) == 1


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("accelerator", "gpu0", "use one of auto, cpu, cuda, mps"),
        ("start_method", "thread", "use one of auto, fork, forkserver, spawn"),
        ("optimizer_kernel", "quick", "use one of auto, fused, foreach, forloop"),
        ("num_workers", -1, "a whole number of at least 0, or auto"),
        ("num_workers", 1.5, "a whole number of at least 0, or auto"),
        ("host_threads", 0, "a whole number of at least 1, or auto"),
        ("prefetch_factor", 0, "a whole number of at least 1, or auto"),
        ("pin_memory", "yes", "use true, false or auto"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(field, value, says):
    with pytest.raises(HardwareError, match=f"hardware.{field}=.*{says}"):
        HardwareSettings(**{field: value})


def test_a_prefetch_of_none_is_a_setting():
    assert HardwareSettings(prefetch_factor=None).prefetch_factor is None
