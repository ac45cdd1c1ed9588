"""The command `plan` with a made-up planner.

Tests cover composition, building, arguments, output and refusals.
"""

import contextlib
import io
import json
from types import SimpleNamespace

import pytest
import torch
from lightning import LightningModule

from lightning_unified.cli.plan.command import main
from lightning_unified.hardware.simulated import PROFILES
from tests.cli.conftest import CONF
from tests.support.lanes import first_cells
from tests.support.planner_calls import GIB, Calls

TINY = ("model=gearhead", "hardware=cpu", "model.width=16", "model.heads=2", "model.layers=1", "model.feed_forward=16")


MINE = f"{__file__}:"


class Net(LightningModule):
    def __init__(self, width=4, depth=1):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))


def three_billion():
    return Net(width=2**14, depth=12)


def my_batch():
    return {"x": torch.zeros(6, 4), "length": 3}


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """One plan, as it is asked for, passed on and printed."""
    calls, folder, out = Calls(), tmp_path_factory.mktemp("empty"), io.StringIO()
    shapes = ("data.batch_size=24", "data.sequence_length=64", "data.val_batch_size=48")
    steps = ("trainer.accumulate_grad_batches=3", "trainer.gradient_clip_val=0.5", "memory.budget=4GiB")
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), calls.in_place():
        code = main([*TINY, *shapes, *steps, "--fits-where"], config_path=CONF)
    return SimpleNamespace(code=code, out=out.getvalue(), folder=folder, calls=calls, call=calls.call)


def test_a_plan_is_printed_and_leaves_nothing_behind(usual):
    assert usual.code == 0
    assert "gearhead on this machine's cpu" in usual.out and "Peak by category" in usual.out
    assert list(usual.folder.iterdir()) == []


def test_the_module_takes_no_memory_and_the_batch_is_the_whole_one(usual):
    assert {parameter.device.type for parameter in usual.call.module.parameters()} == {"meta"}
    assert {name: tuple(tensor.shape) for name, tensor in usual.call.batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "error_code_ids", "diagnosis_labels"), (24, 64)
    )


def test_the_batch_of_validation_is_the_data_module_s_own(usual):
    assert {tuple(tensor.shape) for tensor in usual.call.validation_batch.values()} == {(48, 64)}


def test_the_trainer_is_that_of_the_run_without_what_watches_it(usual):
    trainer = usual.call.trainer

    assert (trainer.accumulate_grad_batches, trainer.gradient_clip_val, trainer.max_steps) == (3, 0.5, 600)
    assert trainer.loggers == [] and not [
        each for each in trainer.callbacks if type(each).__module__.startswith("lightning_unified")
    ]


def test_what_nobody_settled_is_the_planner_s_choice(usual):
    assert (usual.call.micro_batch_size, usual.call.recompute, usual.call.rates) == (None, "auto", None)


def test_what_fits_where_asks_every_machine_with_a_precision_and_rates_of_its_own(usual):
    by_precision = {group.precision: group.machines for group in usual.calls.many}

    assert {name for group in by_precision.values() for name in group} == set(PROFILES)
    assert set(by_precision["32-true"]) == {"rx6750xt-12gb"} and len(by_precision) == 2
    assert by_precision["bf16-mixed"]["h200"][0] == "cuda" and by_precision["bf16-mixed"]["h200"][2] == "rates of h200"


def test_the_planner_gets_resolved_settings_and_other_machines_the_written_ones(command, calls):
    done = command(
        *TINY,
        *("memory=small", "memory.recompute=true", "hardware.precision=bf16-mixed"),
        *("--fits-where", "--json", "--generate", "32", "--rows", "5"),
    )

    call, many = calls.call, calls.many[0]
    assert (call.budget, call.device, call.precision) == (8 * GIB, "cpu", "bf16-mixed")
    assert (call.micro_batch_size, call.recompute) == (4, True)
    assert many.recompute is True and "micro_batch_size" not in vars(many)
    page = json.loads(done.out)
    assert set(page["machines"]) == set(PROFILES)
    assert (page["fits"], page["budget_bytes"], page["effective_batch_size"]) == (True, 8 * GIB, 8)
    assert page["watermarks"] == {"low": int(0.85 * 8 * GIB), "high": 8 * GIB}
    assert page["plan"]["prediction"]["peak_bytes"] == GIB
    assert (page["generation"]["rows"], page["generation"]["new_tokens"]) == (5, 32)
    assert page["generation"]["bytes"]["peak_bytes"] > 0
    assert page["plan"]["reasons"]["budget"].startswith("as written")


@pytest.mark.parametrize(
    ("asked", "planned"), [("blocks", "blocks"), ("whole", "whole"), ("auto", False), ("false", False)]
)
def test_compilation_is_planned_as_a_run_would_compile(command, calls, asked, planned):
    done = command(*TINY, f"memory.compile={asked}", "memory.budget=4GiB", "--json")

    assert calls.call.compile == planned
    reason = json.loads(done.out)["plan"]["reasons"].get("compile", "")
    assert reason.startswith("auto decides when a run begins" if asked == "auto" else "")
    assert bool(reason) == (asked == "auto")  # the real planner gives the other reasons


def test_a_simulated_machine_gives_backend_budget_rates_and_model_settings(command, calls):
    done = command("model=gearhead-34m", "simulate=m2-16gb", "memory.budget=6GiB")

    call = calls.call
    assert (call.device, call.budget, call.rates, call.precision) == ("mps", 6 * GIB, "rates of m2-16gb", "bf16-mixed")
    assert (call.micro_batch_size, call.recompute) == (4, True)
    assert "gearhead-34m on m2-16gb" in done.out


def test_absent_hardware_is_simulated_by_the_smallest_machine_with_the_budget(command, calls):
    done = command(*TINY, "hardware=mps", "memory=large")

    assert (calls.call.device, calls.call.rates, calls.call.budget) == ("mps", "rates of m4-pro-48gb", 28 * GIB)
    assert "it stands in for mps, which is not here" in " ".join(done.out.split())


def test_a_user_s_module_and_batch_are_planned(command, calls):
    done = command(
        "hardware=cpu", "--module", f"{MINE}Net", "--kwargs", "width=8", "depth=2", "--batch", f"{MINE}my_batch"
    )

    assert done.code == 0, done.err
    assert len(calls.call.module.layers) == 2 and calls.call.module.layers[0].in_features == 8
    assert list(calls.call.batch) == ["x", "length"]
    assert "Net, 144 parameters" in done.out and "6 rows: x 6×4 float32" in done.out


def test_a_module_of_three_billion_parameters_is_planned_without_its_memory(command, calls):
    done = command("hardware=cpu", "memory.budget=2GiB", "--module", f"{MINE}three_billion", "--batch-shape", "1x16384")

    assert done.code == 0, done.err
    assert "Net, 3,221,422,080 parameters" in done.out


def test_the_page_is_also_written_and_drawn(command, tmp_path):
    assert command(*TINY, "--markdown", "out/plan.md", "--png", "out/plan.png").code == 0

    assert (tmp_path / "out/plan.md").read_text().startswith("# gearhead on this machine's cpu\n")
    assert (tmp_path / "out/plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_plan_that_fits_nowhere_is_shown_and_is_one(command, calls):
    calls.need = 7 * GIB
    done = command(*TINY, "memory.budget=1GiB")

    assert done.code == 1
    assert "verdict" in done.out and "Memory each plan needs" in done.out
    assert (
        "gearhead does not fit into 1.00 GiB: the smallest step found takes 7.00 GiB. Raise memory.budget" in done.err
    )


MISTAKES = {
    "an unknown flag": (["--fit-where"], "--fit-where: there is no such flag; did you mean --fits-where?"),
    "a flag without its value": (["--png"], "argument --png: expected one argument; see python -m"),
    "a calibration that is neither": (["--calibration", "drop"], "invalid choice: 'drop'"),
    "a misspelt key": (["model.widht=3"], "model.widht: there is no such key; did you mean model.width?"),
    "a run directory": (["run_dir=here"], "run_dir: a plan neither writes nor continues a run directory"),
    "a machine that is not known": (["simulate=m2-15gb"], "did you mean m2-16gb?"),
    "absent hardware of unknown size": (
        ["hardware=mps", "memory.budget=auto"],
        "hardware=mps is not here, and memory.budget=auto depends on the machine. Name one with simulate=m1-8gb",
    ),
    "hardware that contradicts the machine": (["hardware=cuda", "simulate=m2-16gb"], "hardware=cuda is not present"),
    "a budget above the pool": (
        ["simulate=m1-8gb", "memory.budget=28GiB"],
        "the largest tier that fits is memory=debug",
    ),
    "a module without a batch": (["--module", "a:B"], "--module a:B needs a batch to plan for"),
    "two batches": (["--batch", "a:b", "--batch-shape", "2x3"], "--batch and --batch-shape both define"),
    "arguments without a module": (["--kwargs", "a=1"], "--kwargs are the arguments of --module"),
    "a model beside a module": (
        ["model=gearhead", "--module", f"{MINE}Net", "--batch-shape", "2x3"],
        "model: with --module the model and its data are yours",
    ),
    "a generation of nothing that generates": (
        ["hardware=cpu", "--module", f"{MINE}Net", "--batch-shape", "2x3:int64", "--generate", "4"],
        "--generate 4: Net holds no network known to generate",
    ),
    "rows of no generation": (["--rows", "4"], "--rows and --prompt describe a generation; give --generate"),
    "another shell": (["--shell-completion", "install=zsh"], "plan completes in bash"),
}


@first_cells(3, "name", MISTAKES)
def test_a_mistake_is_refused_in_one_clear_message(command, name):
    arguments, message = MISTAKES[name]
    done = command(*arguments)

    assert (done.code, done.out) == (2, "")
    assert message in " ".join(done.err.split())
    assert len(done.err.splitlines()) <= 12
