"""Use of GPUs by all programs, as their drivers report it, on injected machines."""

import subprocess
import sys
from dataclasses import replace

import pytest

from lightning_unified.hardware import GpuReader, Sources
from lightning_unified.hardware.sources import _Programs

MIB, GIB = 2**20, 2**30
CARD = "sys/class/drm/card1/device"
H200 = "0, GPU-a, NVIDIA H200, 143771, 1024, 142200, 37\n1, GPU-b, NVIDIA H200, 143771, 0, 143167, 0\n"
IOREG = (
    '+-o AGXAcceleratorG16S  <class AGXAcceleratorG16S, id 0x100000507, registered, matched, active>\n    {\n      "PerformanceStatistics"'
    f' = {{"In use system memory (driver)"=5,"Alloc system memory"={9 * GIB},"Tiler Utilization %"=20,"Device Utilization %"=21,'
    f'"In use system memory"={6 * GIB}}}\n      "model" = "Apple M4 Pro"\n    }}\n'
)


def with_programs(sources, answers, *, installed=("nvidia-smi",)):
    """Let `sources.run` answer by the first words of `answers` that a command holds."""

    def run(command, timeout_s):
        line = " ".join(command)
        return next((answer for words, answer in answers.items() if words in line), None)

    return replace(sources, run=run, which=lambda name: name if name in installed else None, torch=None)


def files(folder, content):
    for path, text in content.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def figures(device):
    return [figure.bytes for figure in (device.total, device.used, device.available)]


def test_every_nvidia_card_is_read_by_all_programs_use(machine):
    first, second = GpuReader(with_programs(machine("rtx4090"), {"--query-gpu": H200})).read()

    assert (first.device, first.name, first.pool, first.busy) == ("nvidia:0", "NVIDIA H200", "dedicated", 0.37)
    assert figures(first) == [143771 * MIB, 1024 * MIB, 142200 * MIB]
    assert (second.device, second.used.bytes, second.busy) == ("nvidia:1", 0, 0.0)


def test_a_spark_without_driver_memory_figures_shows_the_hosts_pool_and_processes(machine):
    answers = {
        "--query-gpu": "0, GPU-a, NVIDIA GB10, [N/A], [N/A], [N/A], 96\n",
        "--query-compute-apps": "GPU-a, 19135\nGPU-a, 865\nGPU-other, 7\n",
    }
    (device,) = GpuReader(with_programs(machine("gb10", machine="aarch64"), answers)).read()

    assert (device.pool, device.busy) == ("unified", 0.96)
    assert figures(device) == [pytest.approx(119.7 * GIB, rel=1e-6), 20000 * MIB, pytest.approx(115.7 * GIB, rel=1e-6)]


def test_a_spark_whose_driver_calls_all_of_ram_its_memory_is_one_pool_too(machine):
    answers = {"--query-gpu": f"0, GPU-a, NVIDIA GB10, {int(119.7 * 1024)}, 80000, 42000, 0\n", "--query-compute": ""}
    (device,) = GpuReader(with_programs(machine("gb10", machine="aarch64"), answers)).read()

    assert (device.pool, device.used.bytes, device.available.source) == ("unified", 0, "MemAvailable")


def test_a_coherent_machine_keeps_its_own_memory(machine):
    answers = {"--query-gpu": "0, GPU-a, NVIDIA GH200 480GB, 97871, 600, 97000, [N/A]\n"}
    (device,) = GpuReader(with_programs(machine("gh200", machine="aarch64"), answers)).read()

    assert (device.pool, device.total.bytes, device.busy) == ("dedicated", 97871 * MIB, None)
    assert device.busy_source == "unknown: nvidia-smi says [N/A]"


@pytest.mark.parametrize("words", ["[N/A]", "Not Supported", "[Unknown Error]", "[Insufficient Permissions]"])
def test_what_nvidia_smi_cannot_say_on_a_card_is_unknown_and_never_the_hosts(machine, words):
    answers = {"--query-gpu": f"0, GPU-a, Some GPU, {words}, {words}, {words}, {words}\n"}
    (device,) = GpuReader(with_programs(machine("t4"), answers)).read()

    assert (device.pool, figures(device), device.busy) == ("dedicated", [None] * 3, None)
    assert words in device.total.source


def test_a_driver_that_is_there_and_does_not_answer_is_shown_as_such(machine):
    (device,) = GpuReader(with_programs(machine("t4"), {})).read()

    assert (device.device, device.pool, figures(device)) == ("nvidia", None, [None] * 3)
    assert device.total.source == "unknown: nvidia-smi did not answer"


@pytest.mark.parametrize("text", ["No devices were found\n", "", "garbage, with, commas\n"])
def test_an_answer_that_is_no_table_is_no_device(machine, text):
    assert GpuReader(with_programs(machine("t4"), {"--query-gpu": text})).read() == []


def test_a_radeon_card_is_read_from_sysfs(machine, tmp_path):
    sources = with_programs(machine("rx6750xt"), {}, installed=())
    files(
        sources.sys.parent,
        {
            f"{CARD}/mem_info_vram_total": str(12 * GIB),
            f"{CARD}/mem_info_vram_used": str(3 * GIB),
            f"{CARD}/mem_info_gtt_total": str(16 * GIB),
            f"{CARD}/mem_info_gtt_used": str(GIB),
            f"{CARD}/gpu_busy_percent": "55\n",
            f"{CARD}/hwmon/hwmon3/in0_input": "800\n",
        },
    )
    (device,) = GpuReader(sources).read()

    assert (device.device, device.pool, device.busy) == ("amdgpu:card1", "dedicated", 0.55)
    assert figures(device) == [12 * GIB, 3 * GIB, 9 * GIB]


def test_an_apu_counts_its_carve_out_and_what_it_took_of_ram(machine):
    sources = with_programs(machine("strix_halo"), {}, installed=())
    files(
        sources.sys.parent,
        {
            f"{CARD}/mem_info_vram_used": str(GIB // 4),
            f"{CARD}/mem_info_gtt_used": str(40 * GIB),
            f"{CARD}/hwmon/hwmon3/in1_input": "700\n",
        },
    )
    (device,) = GpuReader(sources).read()

    assert (device.pool, device.name, device.busy) == ("unified", "Test CPU", None)
    assert device.total.bytes == pytest.approx((0.5 + 124.9) * GIB, rel=1e-6)
    assert device.used.bytes == 40 * GIB + GIB // 4
    assert device.available.bytes == GIB // 4 + 88 * GIB, "GTT has less left than RAM"


def test_apples_gpu_is_read_from_the_registry_and_by_a_child_process(machine):
    asked = []
    sources = with_programs(machine("m4_pro"), {"IOAccelerator": IOREG, "read('mps')": f"{36 * GIB}\n"}, installed=())
    reader = GpuReader(replace(sources, run=lambda *call: asked.append(call[0][0]) or sources.run(*call)))
    (device,), _ = reader.read(), reader.read()

    assert (device.device, device.name, device.busy) == ("apple", "Apple M4 Pro", 0.21)
    assert figures(device) == [36 * GIB, 6 * GIB, 30 * GIB]
    assert asked == ["ioreg", sys.executable, "ioreg"]


def test_a_mac_that_answers_nothing_has_an_unknown_gpu(machine):
    (device,) = GpuReader(with_programs(machine("m1"), {}, installed=())).read()

    assert (device.total.bytes, device.used.bytes, device.busy) == (None, None, None)
    assert "could not be asked" in device.total.source and "ioreg" in device.used.source


def test_a_reader_never_constructs_metals_allocator(machine, recorder):
    GpuReader(with_programs(machine("m4_pro"), {"IOAccelerator": IOREG}, installed=())).read()

    assert recorder.metal_saw is None


def test_no_machine_makes_it_fail_or_ask_torch(any_machine):
    for device in GpuReader(replace(any_machine, torch=None)).read():
        assert all(figure.source for figure in (device.total, device.used, device.available))


def test_a_program_gives_its_output_and_none_if_it_fails_or_is_not_there():
    run = _Programs()

    assert run([sys.executable, "-c", "print(7)"], 30.0) == "7\n"
    assert run([sys.executable, "-c", "raise SystemExit(3)"], 30.0) is None
    assert run(["no-such-program-here"], 30.0) is None


def test_a_program_that_hangs_is_left_and_not_asked_again_while_it_still_hangs(monkeypatch):
    monkeypatch.setattr(subprocess.Popen, "kill", lambda self: None)  # as one that sits in the kernel
    run = _Programs()
    sleeper = [sys.executable, "-c", "import sys, time; time.sleep(60 * int(sys.argv[1])); print('awake')"]

    assert run([*sleeper, "1"], 0.2) is None
    assert run([*sleeper, "0"], 30.0) is None
    hung = run._hung[sys.executable]
    hung.terminate()
    hung.communicate()
    assert run([*sleeper, "0"], 30.0) == "awake\n"


def test_the_sources_without_torch_have_this_machines_memory():
    sources = Sources.without_torch()

    assert sources.torch is None
    assert sources.run([sys.executable, "-c", "print('here')"], 30.0) == "here\n"
