"""Resuming a stranger's run directory runs nothing that its files name.

Nothing outside of the directory is written either.
"""

import json
import os
import pickle
import shutil

import pytest
import torch
from omegaconf import OmegaConf

from lightning_unified.cli.config.bounded_files import printable, read_json, read_yaml
from lightning_unified.cli.config.trust import is_own
from lightning_unified.errors import ConfigurationError


class Bait:
    def __init__(self, hit):
        self._hit = hit

    def __reduce__(self):
        return (os.makedirs, (str(self._hit), 0o777, True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Where one run of two steps lies, once it was made."""
    return tmp_path_factory.mktemp("finished") / "run"


@pytest.fixture
def run(command, tiny, tmp_path, finished):
    """A copy of a finished run, and the command that resumes it.

    It also holds the path that an attack would create.
    """
    if not finished.exists():
        assert command("memory=debug", "trainer.max_steps=2", f"run_dir={finished}", *tiny).code == 0
    shutil.copytree(finished, tmp_path / "run")

    def resume(*flags):
        return command(f"resume={tmp_path / 'run'}", "trainer.max_steps=3", "trainer.enable_progress_bar=false", *flags)

    return tmp_path / "run", tmp_path / "hit", resume


def change(run, key, value):
    config = OmegaConf.load(run / "config.yaml")
    OmegaConf.update(config, key, value, force_add=True)
    OmegaConf.save(config, run / "config.yaml")


def pickled(run, hit):
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=False)
    torch.save({**checkpoint, "bait": Bait(hit)}, run / "checkpoints/last.ckpt")


def from_the_working_directory(run, hit):
    (run.parent / "localbait.py").write_text(f"import os\nos.mkdir({str(hit)!r})\ndef build(**k): pass\n")
    change(run, "data._target_", "localbait.build")


def torch_load(run, hit):
    with (run / "bait.pt").open("wb") as file:
        pickle.dump(Bait(hit), file)
    OmegaConf.save(
        OmegaConf.merge(
            OmegaConf.load(run / "config.yaml"),
            {"data": {"f": {"_target_": "torch.load", "f": str(run / "bait.pt"), "weights_only": False}}},
        ),
        run / "config.yaml",
    )


def lightnings_own_reader_of_pickles(run, hit):
    change(run, "callbacks.bait", {"_target_": "lightning.fabric.utilities.cloud_io._load", "path_or_url": "bait.pt"})


def through_a_module_of_ours(run, hit):
    change(run, "callbacks.bait", {"_target_": "lightning_unified.cli.ranks.command.os.mkdir", "path": str(hit)})


def in_a_list(run, hit):
    change(run, "callbacks.bait", [{"_target_": "os.mkdir", "path": str(hit)}])


def in_a_saved_override(run, hit):
    with (run / ".hydra/overrides.yaml").open("a") as file:
        file.write(f"- +callbacks.bait={{_target_:os.mkdir,path:{hit}}}\n")


def hydra_callbacks(run, hit):
    with (run / ".hydra/overrides.yaml").open("a") as file:
        file.write(f"- +hydra.callbacks={{bait:{{_target_:os.mkdir,path:{hit}}}}}\n")


def writing_elsewhere(run, hit):
    change(run, "callbacks.checkpoint.dirpath", str(hit))


def a_symbolic_link(run, hit):
    (run / "plan.json").unlink(missing_ok=True)
    (run / "plan.json").symlink_to(hit)


ATTACKS = [
    pickled,
    from_the_working_directory,
    torch_load,
    lightnings_own_reader_of_pickles,
    through_a_module_of_ours,
    in_a_list,
    in_a_saved_override,
    hydra_callbacks,
    writing_elsewhere,
    a_symbolic_link,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_baited_run_is_refused_by_one_error_and_runs_nothing(run, attack, monkeypatch):
    directory, hit, resume = run
    monkeypatch.syspath_prepend(directory.parent)
    attack(directory, hit)
    before = (directory / "metrics.csv").read_bytes()

    done = resume()

    assert done.code in {1, 2}
    assert "--trust" in done.err
    assert not hit.exists()
    assert (directory / "metrics.csv").read_bytes() == before


@pytest.mark.slow
def test_an_honest_run_goes_on_without_the_flag_also_after_it_was_moved(run, command):
    directory, _, _ = run
    (directory / "newest.ckpt").symlink_to("checkpoints/last.ckpt")  # a link to inside of the run is honest

    shutil.move(directory, directory.parent / "moved")
    done = command(f"resume={directory.parent / 'moved'}", "trainer.max_steps=3", "trainer.enable_progress_bar=false")
    assert done.code == 0
    assert not directory.exists()


def test_trust_takes_a_pickle_of_the_users_own(run):
    directory, hit, resume = run
    pickled(directory, hit)

    assert resume("--trust").code == 0
    assert hit.exists()


OWN = {
    "lightning_unified.models.gearhead.GearHead": True,
    "lightning.Trainer": True,
    "lightning.pytorch.callbacks.EarlyStopping": True,
    "lightning.pytorch.loggers.TensorBoardLogger": True,
    "lightning_unified.hardware.HardwareSettings": True,
    "lightning.pytorch.cli.LightningCLI": False,
    "lightning_unified.cli.main.main": False,
    "lightning.pytorch.core.module.torch.load": False,
    "torch.optim.AdamW": False,
    "": False,
}


@pytest.mark.parametrize("path", OWN)
def test_only_training_classes_of_ours_and_lightnings_are_own(path):
    assert is_own(path) is OWN[path]


BOMBS = {
    "aliases": "a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    "depth": "[" * 5000 + "]" * 5000,
    "size": "a: " + "x" * (2 << 20),
    "no YAML": "a: [1\nb: }",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_yaml_beyond_the_limits_is_refused(bomb, tmp_path):
    (tmp_path / "config.yaml").write_text(BOMBS[bomb])
    with pytest.raises(ConfigurationError, match=r"config\.yaml"):
        read_yaml(tmp_path / "config.yaml")


def test_json_that_nests_too_deep_is_refused_and_control_characters_are_replaced(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 200_000 + "]" * 200_000)
    (tmp_path / "red.json").write_text(json.dumps({"name\x1b[31m": ["a\x07b\x9b1mc\r\n\td"]}))

    with pytest.raises(ConfigurationError, match=r"deep\.json"):
        read_json(tmp_path / "deep.json")
    assert read_json(tmp_path / "red.json") == {"name\ufffd[31m": ["a\ufffdb\ufffd1mc\ufffd\n\td"]}
    assert printable("\x1b]0;title\x07") == "\ufffd]0;title\ufffd"


@pytest.mark.slow
def test_a_run_with_a_class_of_the_users_own_prints_a_resume_command_that_trusts_it(
    command, tiny, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_callback.py").write_text("import lightning as L\nclass Own(L.Callback): pass\n")

    done = command(
        "memory=debug", "trainer.max_steps=1", "run_dir=run", "+callbacks.own={_target_:own_callback.Own}", *tiny
    )
    assert done.code == 0
    assert "resume=run --trust" in done.out
    assert command("resume=run", "trainer.max_steps=2").code == 2
    assert command("resume=run", "--trust", "trainer.max_steps=2", "trainer.enable_progress_bar=false").code == 0


def test_a_configuration_that_is_none_is_refused_by_what_it_lacks(run):
    directory, _, resume = run
    (directory / "config.yaml").write_text("run_dir: run\nmodel: {}\n")

    done = resume()
    assert done.code == 2
    assert "it has no data, hardware, memory, trainer" in done.err
