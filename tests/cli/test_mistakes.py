"""What makes no sense is refused in a few lines that say what would."""

import re
from dataclasses import replace

import pytest

from lightning_unified.cli.run import machine
from lightning_unified.hardware import Figure, read
from tests.support.lanes import some

TINY = ("hardware=cpu", "data=builtin", "model.heads=2", "model.layers=1", "trainer.enable_progress_bar=false")

MISTAKES = {
    "hardware that is not here": (
        ["hardware=mps", "memory=large"],
        r"hardware=mps is not present; this machine has.*hardware=cpu or hardware=auto",
    ),
    "a misspelt choice": (["memory=larg"], r"memory=larg: there is no such choice; did you mean large\?"),
    "a misspelt choice in a sweep": (
        ["-m", "memory=debug,smal"],
        r"memory=smal: there is no such choice; did you mean small\?",
    ),
    "a choice of nothing": (["memory=null"], r"memory=null: there is no such choice\. memory is one of auto, debug"),
    "a group left out": (["~memory"], r"~memory: a run needs one; memory is one of auto, debug"),
    "a choice that is far from all": (
        ["experiment=zzz"],
        r"experiment=zzz: there is no such choice\. experiment is one of",
    ),
    "a misspelt choice beside --help": (["--help", "memory=smal"], r"did you mean small\?"),
    "a misspelt choice beside --cfg": (["--cfg", "job", "memory=smal"], r"did you mean small\?"),
    "a folder of settings that is not there": (["--config-dir", "nowhere"], r"--config-dir nowhere: there is no such"),
    "a run directory that is a file": (
        ["run_dir=/dev/null", *TINY],
        r"run_dir: /dev/null cannot be written \(File exists\)",
    ),
    "a seed in words": (["seed=abc"], r"seed=abc: it is a whole number from 0"),
    "a negative seed": (["seed=-1"], r"seed=-1: it is a whole number from 0"),
    "loader workers in words": (["hardware.num_workers=lots"], r"hardware\.num_workers='lots' is not a valid count"),
    "a misspelt group": (["memry=small"], r"memry: there is no such key; did you mean memory\?"),
    "a misspelt key": (
        ["trainer.max_stepz=3"],
        r"trainer\.max_stepz: there is no such key; did you mean trainer\.max_steps\?",
    ),
    "a key without its group": (["max_steps=3"], r"did you mean trainer\.max_steps\?"),
    "a key that is far from all": (["warp=9"], r"warp: there is no such key; see python train\.py --help"),
    "a list without -m": (["memory=debug,small"], r"several values are a sweep; add -m"),
    "no override": (["small"], r"'small' is not an override .*write key=value"),
    "an unknown flag": (["--hlp"], r"--hlp: there is no such flag; did you mean --help\?"),
    "a budget that cannot hold the weights": (
        ["memory=debug", "memory.budget=1MiB", *TINY],
        r"cannot hold GearHead: weights",
    ),
    "a budget above every machine": (["memory.budget=900TiB"], r"above the pool of .*the largest tier that fits"),
    "a budget that is no amount": (["memory.budget=lots"], r"a budget of 'lots' .*write auto, 28GiB"),
    "a negative batch": (["data.batch_size=-4"], r"data\.batch_size=-4: .*1 or more"),
    "a micro-batch of nothing": (["memory.micro_batch_size=0"], r"memory\.micro_batch_size=0: .*1 or more, or auto"),
    "steps in words": (["trainer.max_steps=many"], r"trainer\.max_steps=many: .*optimizer steps"),
    "two precisions": (
        ["trainer.precision=32"],
        r"beside hardware.precision=auto.* Give hardware.precision=32-true alone",
    ),
    "a run without an end": (["trainer.max_steps=-1"], r"would never end; give one of them"),
    "an unknown source": (["data.source=pydok"], r"data\.source='pydok'; it must be one of .*did you mean pydoc\?"),
    "an unknown preset": (
        ["model.preset=gearhead-35m"],
        r"preset='gearhead-35m' is not offered; did you mean gearhead-34m\?",
    ),
    "text where a number belongs": (["model.learning_rate=fast"], r"model\.learning_rate=fast: it must be a number"),
    "files that are not there": (["data=files", "data.path=nowhere.jsonl"], r"nowhere\.jsonl"),
    "resuming from nothing": (["resume=nowhere"], r"resume=nowhere: there is no such directory"),
    "resuming from another folder": (["resume=."], r"not a run directory \(it has no config\.yaml\)"),
    "resuming a sweep": (["-m", "resume=.", "seed=1,2"], r"not the directory of a sweep \(it has no multirun\.yaml\)"),
}


OF_EACH_SORT = (
    "hardware that is not here",
    "a misspelt choice in a sweep",
    "a run directory that is a file",
    "a misspelt key",
    "a list without -m",
    "a budget that cannot hold the weights",
    "files that are not there",
    "resuming from nothing",
)


@pytest.mark.parametrize("name", some(MISTAKES, *OF_EACH_SORT))
def test_a_mistake_is_refused_in_one_clear_message_and_leaves_nothing(command, name, tmp_path):
    arguments, message = MISTAKES[name]
    done = command(*arguments)

    assert done.code == 2
    assert "Traceback" not in done.out + done.err
    assert len(done.lines) <= 12
    assert re.search(message, done.err), done.err
    assert list(tmp_path.rglob("*")) == []


def test_a_budget_that_the_machine_does_not_have_names_the_largest_tier_that_it_has(command, monkeypatch):
    monkeypatch.setattr(
        machine,
        "read",
        lambda device, **rest: replace(read(device, **rest), total=Figure(20 * 2**30, "a machine of 20 GiB")),
    )
    done = command("memory.budget=28GiB", *TINY)

    assert done.code == 2
    assert "the largest tier that fits is memory=medium" in done.err


def test_the_traceback_is_there_for_those_who_ask(command, monkeypatch):
    monkeypatch.setenv("LIGHTNING_UNIFIED_DEBUG", "1")

    assert "Traceback" in command("memory=larg").err


def test_a_refused_run_leaves_the_folders_of_others_as_they_were(command, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "notes.txt").touch()
    done = command("data=files", "data.path=nowhere.jsonl")

    assert done.code == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "notes.txt", "runs"]
