"""Runs under unified_fsdp: folders as checkpoints, resumed, consolidated and used."""

import shutil

import pytest
import torch

from lightning_unified.cli.main import main
from lightning_unified.models.gearhead.diagnoser import Diagnoser
from tests.support.ranks.launched import TINY, Launched

FSDP = "trainer.strategy=unified_fsdp"


def train(folder, *arguments):
    done = Launched(*arguments, cwd=folder).wait()
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    train(folder, FSDP, *TINY, "trainer.max_steps=2", "run_dir=run")
    return folder / "run"


@pytest.fixture
def here(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "run")
    return tmp_path


def consolidated(folder):
    assert main(["consolidate", f"{folder}/checkpoints/last.ckpt", "--output", f"{folder}.ckpt"]) == 0
    return torch.load(f"{folder}.ckpt", weights_only=True)


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_was_never_stopped(here):
    train(here, "resume=run", "trainer.max_steps=4")
    train(here, FSDP, *TINY, "trainer.max_steps=4", "run_dir=straight")
    resumed, straight = consolidated("run"), consolidated("straight")

    assert (here / "run/checkpoints/last.ckpt").is_dir()
    assert resumed["global_step"] == straight["global_step"] == 4
    assert all(torch.equal(value, resumed["state_dict"][name]) for name, value in straight["state_dict"].items())
    moments = resumed["optimizer_states"][0]["state"]
    assert moments.keys() == straight["optimizer_states"][0]["state"].keys()
    assert all(
        torch.equal(moments[key]["exp_avg"], one["exp_avg"])
        for key, one in straight["optimizer_states"][0]["state"].items()
    )


@pytest.mark.slow
def test_a_run_goes_on_in_one_process_and_in_one_file(here):
    train(here, "resume=run", "trainer.max_steps=3", "fsdp.save_distributed_checkpoint=false")

    assert (here / "run/checkpoints/last.ckpt").is_file()
    assert torch.load(here / "run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 3


def test_a_folder_is_consolidated_into_a_file_of_the_usual_form(here, capsys):
    assert main(["consolidate", "run/checkpoints/last.ckpt"]) == 0
    assert capsys.readouterr().out.startswith("run/checkpoints/last.consolidated.ckpt (")
    whole = torch.load("run/checkpoints/last.consolidated.ckpt", weights_only=True)

    assert {"state_dict", "optimizer_states", "loops", "callbacks", "hyper_parameters"} <= whole.keys()
    optimizer = whole["optimizer_states"][0]
    assert sorted(optimizer["state"]) == sorted(key for group in optimizer["param_groups"] for key in group["params"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nothing.ckpt"], 2, "nothing.ckpt is not there; give the folder of a distributed checkpoint"),
        (["run/config.yaml"], 2, "is a file, which is one already"),
        (["run/checkpoints/last.ckpt", "--output", "run/config.yaml"], 2, "is there already; give another name"),
        (["run/checkpoints"], 1, "is not a whole distributed checkpoint: it has no meta.pt"),
    ],
)
def test_what_cannot_be_consolidated_is_said(here, capsys, arguments, code, words):
    assert main(["consolidate", *arguments]) == code
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_trained_model_is_used_from_a_folder(here):
    assert Diagnoser.from_checkpoint(here / "run/checkpoints/last.ckpt", device="cpu") is not None


@pytest.mark.slow
def test_a_run_whose_folder_lacks_a_piece_is_refused_at_once(here):
    (here / "run/checkpoints/last.ckpt/__1_0.distcp").unlink()
    done = Launched("resume=run", "trainer.max_steps=4", cwd=here).wait()

    assert [each.returncode for each in done] == [1, 1]
    assert sum("it has no __1_0.distcp" in each.stderr for each in done) == 1
