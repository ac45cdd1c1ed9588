"""Output of watch on injected machines, and the runs it considers alive."""

import io
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from lightning_unified.cli.watch.runs import running
from lightning_unified.cli.watch.snapshot import Observer
from lightning_unified.cli.watch.view import show
from lightning_unified.files.status import RunFigures, RunRecord
from lightning_unified.hardware import Sources

MIB, GIB = 2**20, 2**30
KEYS = ["time", "host", "pressure", "swap", "devices", "runs"]
SMI = {
    "rtx4090": "0, GPU-a, NVIDIA GeForce RTX 4090, 24564, 9000, 15200, 98\n1, GPU-b, NVIDIA GeForce RTX 4090, 24564, 10, 24190, 0\n",
    "gb10": "0, GPU-a, NVIDIA GB10, [N/A], [N/A], [N/A], 96\n",
}


def minutes_ago(count):
    return (datetime.now(UTC) - timedelta(minutes=count)).isoformat(timespec="milliseconds")


def record(**changes):
    figures = RunFigures(
        directory="/home/someone/runs/gearhead/2026-01-31_12-00-00",
        module="GearHead",
        device="cuda:0",
        step=12345,
        total_steps=20000,
        loss=2.3125,
        effective_batch_size=64,
        micro_batch_size=16,
        allocated_bytes=3 * GIB,
        reserved_bytes=4 * GIB,
        peak_bytes=6 * GIB,
        peak_source="torch.cuda.max_memory_allocated",
        budget_bytes=8 * GIB,
        recoveries=2,
    )
    own = {
        "pid": os.getpid(),
        "host": platform.node(),
        "started": minutes_ago(9),
        "updated": minutes_ago(0),
        "seconds_per_step": 0.2,
    }
    return RunRecord(
        **{**own, **{name: value for name, value in changes.items() if name in own}},
        figures=replace(figures, **{name: value for name, value in changes.items() if name not in own}),
    )


@pytest.fixture
def runs(tmp_path):
    """Write records into a folder of runs; return the folder."""
    folder = tmp_path / "runs"
    folder.mkdir()

    def write(*records):
        for at, each in enumerate(records):
            (folder / f"host-{at}.json").write_text(json.dumps(each.as_json()))
        return folder

    return write


@pytest.fixture
def sources(machine):
    """The sources of a named machine with its driver's programs.

    It has this machine's processes and no torch.
    """

    def build(name, **parts):
        def run(command, timeout_s):
            return SMI.get(name) if "--query-gpu" in " ".join(command) else "GPU-a, 30000\n"

        has_driver = name in SMI
        found = machine(name, machine="aarch64" if name == "gb10" else "x86_64")
        given = {"process_start": Sources.without_torch().process_start} | parts
        return replace(found, torch=None, which=lambda program: "here" if has_driver else None, run=run, **given)

    return build


def text_of(snapshot, width):
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(show(snapshot, width=width))
    return console.export_text()


def look(sources, folder=None):
    observer = Observer(sources, directory=folder)
    observer.look(1.0)
    return observer.look(2.0)


def alive(sources, folder):
    return [each.pid for each in running(folder, sources)]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", ["rtx4090", "gb10", "strix_halo", "m4_pro", "bare"])
def test_the_view_fits_its_terminal_and_cuts_no_figure(sources, runs, name, width):
    folder = runs(record(), record(step=7, effective_batch_size=None, micro_batch_size=None, reserved_bytes=None))
    shown = text_of(look(sources(name), folder), width)

    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    for words in (
        "pressure",
        "swap",
        "allocated",
        "reserved",
        "available",
        "budget",
        "6.00 GiB",
        "12,345",
        "micro-batch",
        "12,345 of 20,000 (62%)",
        "loss 2.312",
        "200 ms/step",
        "25 min 31 s left",
    ):
        assert words in " ".join(shown.split()), words


def test_a_long_directory_loses_its_first_folders_and_no_word_is_broken(sources, runs):
    folder = runs(
        record(directory="/scratch/users/someone/experiments/runs/a_run_with_quite_a_long_name", module="A" * 30)
    )
    shown = text_of(look(sources("rtx4090"), folder), 60)

    assert "…/someone/experiments/runs/a_run_with_quite_a_long_name" in shown
    assert all(word in shown for word in ("A" * 30, "NVIDIA", "RTX", "available"))
    assert max(map(len, shown.splitlines())) <= 60


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": "nan"}, "loss nan"),
        ({"loss": None, "total_steps": None}, "step 12,345, loss – (none is logged), 200 ms/step"),
        ({"seconds_per_step": None}, "(62%), loss 2.312"),
        ({"recoveries": 1}, "1 recovery"),
    ],
)
def test_unknown_progress_is_said_or_left_out(sources, runs, changes, said):
    shown = text_of(look(sources("bare"), runs(record(**changes))), 120)

    assert said in shown
    assert (" left" in shown) == (not {"total_steps", "seconds_per_step"} & set(changes))


def test_a_box_with_two_cards_shows_the_host_and_both(sources):
    snapshot = look(sources("rtx4090"))
    shown = text_of(snapshot, 120)

    assert [device.device for device in snapshot.devices] == ["host", "nvidia:0", "nvidia:1"]
    assert "8.79 GiB" in shown and "98%" in shown and "37%" in shown


def test_a_spark_shows_its_one_pool_and_the_gpus_part(sources):
    host, gpu = look(sources("gb10")).devices

    assert (host.total, host.available) == (gpu.total, gpu.available)
    assert gpu.used.bytes == 30000 * MIB


def test_without_a_run_the_view_says_so(sources):
    assert 'no run with strategy="unified"' in text_of(look(sources("bare")), 80)


def test_the_reason_of_an_unknown_figure_stands_in_the_view(sources):
    shown = text_of(look(sources("bare")), 200)

    assert "unknown: neither MemTotal of /proc/meminfo nor sysctl hw.memsize" in shown
    assert "no source of memory pressure can be read here" in shown


def test_pressure_and_its_reason_stand_in_the_view(sources):
    tight = sources("rtx4090")
    (tight.proc / "meminfo").write_text("MemTotal: 67108864 kB\nMemFree: 1000 kB\nMemAvailable: 2097152 kB\n")

    assert "warn: only 2.00 GiB of 64.00 GiB is available (MemAvailable)" in text_of(look(tight), 120)


def test_swap_is_what_the_system_says(sources):
    linux, mac = sources("t4"), sources("m2", sysctl=lambda name: 3 * GIB << 128 | 4 * GIB)
    with (linux.proc / "meminfo").open("a") as file:
        file.write("SwapTotal: 2048 kB\nSwapFree: 1536 kB\n")
    found = [look(each) for each in (linux, mac)]

    assert [(each.swap_used.bytes, each.swap_total.bytes) for each in found] == [
        (512 * 1024, 2 * MIB),
        (3 * GIB, 4 * GIB),
    ]
    assert "512.00 KiB of 2.00 MiB used" in text_of(found[0], 80)


def test_every_machine_is_seen_without_torch_and_as_json(any_machine, runs):
    folder = runs(record())
    printed = json.loads(json.dumps(look(replace(any_machine, torch=None), folder).as_json()))

    assert list(printed) == KEYS
    assert set(printed["pressure"]) == {
        "level", "available", "swap_out_bytes_per_s", "stall_share", "reasons", "decompressed_bytes_per_s",
    }  # fmt: skip
    assert set(printed["swap"]) == {"total", "used"}
    assert set(printed["devices"][0]) == {
        "device", "name", "pool", "total", "used", "available", "busy", "busy_source",
    }  # fmt: skip
    assert set(printed["devices"][0]["total"]) == {"bytes", "source"}


def test_a_run_is_one_flat_object(sources, runs):
    (run,) = look(sources("rtx4090"), runs(record())).as_json()["runs"]

    assert (run["pid"], run["micro_batch_size"], run["peak_bytes"], run["budget_bytes"]) == (
        os.getpid(),
        16,
        6 * GIB,
        8 * GIB,
    )


def test_all_ranks_of_a_run_stand_below_it_each_with_its_memory(sources, runs):
    first = record(run="127.0.0.1:29500", ranks=2, allocated_bytes=1 * GIB)
    second = record(
        run="127.0.0.1:29500", ranks=2, rank=1, device="cuda:1", allocated_bytes=2 * GIB, micro_batch_size=8
    )
    snapshot = look(sources("rtx4090"), runs(second, first, record(module="Other")))
    text = text_of(snapshot, 200)

    assert text.count("GearHead on cuda:0") == 1
    assert "batch 64, 2 ranks, 2 recoveries" in text
    assert f"rank 0 of 2: cuda:0, process {os.getpid()}, micro-batch 16, allocated 1.00 GiB" in text
    assert f"rank 1 of 2: cuda:1, process {os.getpid()}, micro-batch 8, allocated 2.00 GiB" in text
    assert [(run["rank"], run["ranks"]) for run in snapshot.as_json()["runs"]].count((1, 2)) == 1


def test_a_record_of_an_earlier_version_is_a_run_of_one_rank(sources, runs):
    folder = runs(record())
    (path,) = folder.iterdir()
    path.write_text(
        json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in ("rank", "ranks", "run")})
    )

    (run,) = look(sources("rtx4090"), folder).as_json()["runs"]
    assert (run["rank"], run["ranks"], run["run"]) == (0, 1, None)


def test_a_run_of_this_process_lives_and_one_that_ended_is_cleared_away(sources, runs):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    folder = runs(record(), record(pid=ended.pid))

    assert alive(sources("t4"), folder) == [os.getpid()]
    assert [path.name for path in folder.iterdir()] == ["host-0.json"]


def test_a_process_that_was_killed_and_not_yet_waited_for_has_ended(sources, runs):
    zombie = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    zombie.kill()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert alive(sources("t4"), runs(record(pid=zombie.pid))) == []
    finally:
        zombie.wait()


def test_a_number_that_another_process_has_now_is_no_run(sources, runs):
    folder = runs(record(updated=minutes_ago(60 * 24 * 365 * 30)))

    assert alive(sources("t4"), folder) == []
    assert list(folder.iterdir()) == []


def test_a_run_of_another_machine_in_the_same_home_is_neither_shown_nor_removed(sources, runs):
    folder = runs(record(host="elsewhere"))

    assert alive(sources("t4"), folder) == []
    assert len(list(folder.iterdir())) == 1


def test_what_nobody_can_be_asked_about_goes_after_a_week(sources, runs):
    folder = runs(record(host="elsewhere"))
    (folder / "other.json").write_text("not a record")
    (folder / "half.tmp").write_text("{")
    assert alive(sources("t4"), folder) == []
    assert len(list(folder.iterdir())) == 3
    for path in folder.iterdir():
        os.utime(path, (0, time.time() - 8 * 86400))

    assert alive(sources("t4"), folder) == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("start", "lives"), [(time.time() - 5, True), (0.0, True), (None, False)], ids=["new", "old", "gone"]
)
def test_a_mac_does_not_mind_its_changed_name(machine, runs, start, lives):
    mac = machine("m2", process_start={4242: start}.get)

    assert alive(mac, runs(record(pid=4242, host="old-name.local"))) == ([4242] if lives else [])


def test_a_number_reused_on_a_mac_is_no_run(machine, runs):
    mac = machine("m2", process_start={4242: time.time() - 5}.get)

    assert alive(mac, runs(record(pid=4242, updated=minutes_ago(30)))) == []


def test_a_folder_that_is_not_there_is_no_run(sources, tmp_path):
    assert alive(sources("t4"), tmp_path / "absent") == []
    assert alive(sources("t4"), None) == []


def test_a_record_cannot_send_a_terminal_its_control_characters(sources, runs):
    (found,) = running(runs(record(module="Net\x1b]0;owned\x07")), sources("bare"))

    assert found.figures.module == "Net\ufffd]0;owned\ufffd"
