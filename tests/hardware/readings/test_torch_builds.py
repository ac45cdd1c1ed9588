"""The build of torch that fits a machine, and pip's arguments for it.

No machine but this one is needed.
"""

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from lightning_unified.hardware import Sources
from lightning_unified.hardware.environment.__main__ import main
from lightning_unified.hardware.environment.builds import read_machine
from lightning_unified.hardware.environment.torch_builds import Machine, builds_for, choose_build, pip_arguments

PC, ARM = {"platform": "linux", "machine": "x86_64"}, {"platform": "linux", "machine": "aarch64"}
MAC = {"platform": "darwin", "machine": "arm64"}
CARD = {"nvidia": True, "driver": (580, 65, 6), "capability": (8, 6)}
CHOICES = {
    "a PC without a GPU": (PC, "cpu", "no NVIDIA or AMD GPU"),
    "an ARM server without a GPU": (ARM, "cpu", "no NVIDIA or AMD GPU"),
    "an NVIDIA card": (PC | CARD, "cu130", "compute capability 8.6.*driver 580.65.6"),
    "an NVIDIA card that says nothing of itself": (PC | {"nvidia": True}, "cu130", "unknown version"),
    "an NVIDIA card and an AMD one": (PC | CARD | {"amd": True}, "cu130", "NVIDIA"),
    "an NVIDIA card with an older driver": (PC | CARD | {"driver": (535, 104)}, "cu126", "535.104"),
    "an NVIDIA card of 2016": (PC | CARD | {"capability": (6, 1)}, "cu126", "6.1"),
    "an NVIDIA card of 2012": (PC | CARD | {"capability": (3, 5)}, "cpu", "no kernels"),
    "a driver too old for torch": (PC | CARD | {"driver": (470, 82)}, None, "470.82 .*update it to 580"),
    "a Blackwell card with an older driver": (
        PC | CARD | {"driver": (575,), "capability": (12, 0)},
        None,
        "update it to 580",
    ),
    "an NVIDIA card under nouveau": (PC | {"nvidia": True, "nouveau": True}, None, "install NVIDIA's driver"),
    "Windows with an NVIDIA card": (CARD | {"platform": "win32", "machine": "AMD64"}, "cu130", "NVIDIA"),
    "a DGX Spark": (ARM | CARD | {"capability": (12, 1)}, "cu130", "12.1"),
    "a Jetson Thor": (ARM | CARD | {"tegra": True, "capability": (11, 0)}, "cu130", "11.0"),
    "a Jetson Orin with JetPack 6": (
        ARM | {"nvidia": True, "tegra": True, "driver": (540, 3)},
        None,
        "update it to JetPack 7.2",
    ),
    "a Jetson whose driver is unknown": (ARM | {"nvidia": True, "tegra": True}, None, "JetPack"),
    "a Strix Halo": (PC | {"amd": True, "architectures": ("gfx1151",)}, "rocm7.2", "gfx1151"),
    "an AMD card of unknown architecture": (PC | {"amd": True}, "rocm7.2", "unknown architecture"),
    "an RX 6750 XT": (PC | {"amd": True, "architectures": ("gfx1031",)}, None, "HSA_OVERRIDE_GFX_VERSION=10.3.0"),
    "the display part of a Ryzen": (PC | {"amd": True, "architectures": ("gfx1036",)}, "cpu", "no kernels"),
    "an AMD card and the display part": (PC | {"amd": True, "architectures": ("gfx1036", "gfx1100")}, "rocm7.2", ""),
    "an AMD card in an ARM machine": (ARM | {"amd": True, "architectures": ("gfx1100",)}, "cpu", "x86-64 only"),
    "Apple silicon": (MAC, "metal", "Apple silicon"),
    "Apple silicon with macOS 15": (MAC | {"macos": (15, 1)}, "metal", "Apple silicon"),
    "Apple silicon with macOS 13": (MAC | {"macos": (13, 6)}, None, "macOS 14.*this is macOS 13.6"),
    "an Intel Python under Rosetta": (
        MAC | {"machine": "x86_64", "translated": True},
        None,
        "Python for Apple silicon",
    ),
    "an Intel Mac": (MAC | {"machine": "x86_64"}, None, "Intel Mac"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_each_machine_gets_its_build_or_its_remedy(name):
    facts, build, reason = CHOICES[name]
    machine = Machine(**facts)
    choice = choose_build(machine)

    assert choice.build == build
    assert re.search(reason, choice.reason), choice.reason
    assert build is None or build in builds_for(machine)
    assert choice.runs_on_cpu == (build is not None or facts["platform"] != "darwin")


@pytest.mark.parametrize(
    ("build", "platform", "wanted"),
    [
        ("cu130", "linux", "torch==2.13.0"),
        ("metal", "darwin", "torch==2.13.0"),
        ("cpu", "win32", "torch==2.13.0"),
        ("cpu", "linux", "torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu"),
        ("cu126", "linux", "torch==2.13.0+cu126 --extra-index-url https://download.pytorch.org/whl/cu126"),
        ("rocm7.2", "linux", "torch==2.13.0+rocm7.2 --extra-index-url https://download.pytorch.org/whl/rocm7.2"),
        ("cu130", "win32", "torch==2.13.0+cu130 --extra-index-url https://download.pytorch.org/whl/cu130"),
    ],
)
def test_the_arguments_of_pip_can_get_no_other_gpu_build(build, platform, wanted):
    assert " ".join(pip_arguments(build, "2.13.0", platform=platform)) == wanted


def test_without_a_release_only_the_index_of_the_build_is_asked():
    assert pip_arguments("rocm7.2", "") == ["torch", "--index-url", "https://download.pytorch.org/whl/rocm7.2"]


def machine_of(tmp_path, files, **parts):
    for path, content in files.items():
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)
    return Sources(torch=None, proc=tmp_path / "proc", sys=tmp_path / "sys", **parts)


NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.144.03  Release Build  (dvs-builder)\nGCC version:  gcc version 12.3.0\n"
NODE = "cpu_cores_count 0\ngfx_target_version {}\nlocation_id 768\n"


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"proc/driver/nvidia/version": NVRM}, {"nvidia": True, "driver": (550, 144, 3)}),
        ({"sys/module/nvidia/version": "580.95.05\n"}, {"nvidia": True, "driver": (580, 95, 5)}),
        (
            {"sys/class/drm/card0/device/vendor": "0x10de\n", "sys/module/nouveau/version": ""},
            {"nvidia": True, "nouveau": True},
        ),
        ({"proc/device-tree/compatible": "nvidia,p3701\0nvidia,tegra234\0"}, {"nvidia": True, "tegra": True}),
        (
            {
                "sys/class/drm/card1/device/vendor": "0x1002\n",
                "sys/class/kfd/kfd/topology/nodes/0/properties": NODE.format(0),
                "sys/class/kfd/kfd/topology/nodes/1/properties": NODE.format(110501),
                "sys/class/kfd/kfd/topology/nodes/2/properties": NODE.format(90010),
            },
            {"amd": True, "architectures": ("gfx1151", "gfx90a")},
        ),
        ({"sys/class/drm/card1/device/vendor": "0x1002\n"}, {}),
        ({}, {}),
    ],
)
def test_the_facts_are_read_from_the_files_of_drivers(tmp_path, files, wanted):
    assert read_machine(machine_of(tmp_path, files)) == Machine(platform="linux", machine="x86_64", **wanted)


def test_nvidia_smi_gives_the_driver_and_the_newest_card(tmp_path):
    said = "576.02, 6.1\n576.02, 12.0\n"
    found = read_machine(machine_of(tmp_path, {}, which=lambda name: name, run=lambda command, timeout_s: said))

    assert (found.nvidia, found.driver, found.capability) == (True, (576, 2), (12, 0))


@pytest.mark.parametrize("said", [None, "580.1, [N/A]\n"])
def test_an_nvidia_smi_that_knows_little_leaves_the_rest_unknown(tmp_path, said):
    found = read_machine(machine_of(tmp_path, {}, which=lambda name: name, run=lambda command, timeout_s: said))

    assert found.capability is None
    assert found.driver == (None if said is None else (580, 1))


def test_the_override_of_an_architecture_is_the_one_that_rocm_sees(tmp_path):
    files = {
        "sys/class/drm/card0/device/vendor": "0x1002",
        "sys/class/kfd/kfd/topology/nodes/1/properties": NODE.format(100301),
    }
    sources = machine_of(tmp_path, files)

    assert choose_build(read_machine(sources)).build is None
    assert (
        choose_build(read_machine(replace(sources, environ={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}))).build == "rocm7.2"
    )


def test_a_mac_is_known_by_its_processor_and_its_system():
    known = {"hw.optional.arm64": 1, "kern.osproductversion": "14.5"}
    mac = Sources(torch=None, platform="darwin", machine="x86_64", sysctl=known.get)

    assert read_machine(mac) == Machine(platform="darwin", machine="x86_64", translated=True, macos=(14, 5))
    assert read_machine(replace(mac, machine="arm64")).translated is False


def test_the_command_prints_the_arguments_or_the_remedy(tmp_path, capsys):
    spark = machine_of(tmp_path, {"sys/module/nvidia/version": "580.95.05"}, machine="aarch64")
    assert main(["--release", "2.13.0"], sources=spark) == 0
    assert capsys.readouterr() == (
        "torch==2.13.0\n",
        "torch's build: cu130 (NVIDIA GPU, driver 580.95.5)\n",
    )

    (tmp_path / "sys/module/nvidia/version").write_text("470.57")
    assert main([], sources=spark) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "too old" in err and "TORCH=cpu" in err

    assert main(["--release", "2.13.0", "--build", "cpu"], sources=spark) == 0
    assert capsys.readouterr().out.endswith("whl/cpu --no-deps\n")
    with pytest.raises(SystemExit):
        main(["--build", "metal"], sources=spark)


def test_the_choice_needs_no_installed_package():
    code = "import sys; import lightning_unified.hardware.environment.__main__; print({name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert not {"torch", "numpy", "psutil", "lightning", "rich", "omegaconf", "yaml"} & eval(done.stdout)
