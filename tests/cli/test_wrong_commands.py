"""One line answers a wrong override or flag: the value, what is allowed, and exit code 2.

`test_mistakes.py` has the wrong overrides that must leave nothing behind; tests/trainer/test_wrong_arguments.py has Python's arguments.
"""

import re
from types import SimpleNamespace

import pytest

from lightning_unified.cli import doctor, main
from lightning_unified.cli.plan import command as plan
from lightning_unified.cli.report import command as report
from lightning_unified.cli.watch import command as watch
from lightning_unified.models.classifier import __main__ as classifier
from tests.cli.conftest import CONF, TINY
from tests.support.lanes import first_cells, some

MODULE = """
import torch, lightning as L
class Net(L.LightningModule):
    def __init__(self, width=4):
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
class NotOne: pass
"""
NET = ("hardware=cpu", "--module", "mine.py:Net")
SHAPE = ("--batch-shape", "2x4")
CSV = ("hardware=cpu", "model=classifier-tiny", "data=classifier-files")

TRAIN = {
    "no device": (("trainer.devices=0",), "devices=0"),
    "an unknown accelerator": (("trainer.accelerator=tpuu",), "accelerator='tpuu'"),
    "an unknown precision": (("hardware.precision=fp8",), "precision='fp8' is not known; choose one of"),
    "workers below nothing": (("hardware.num_workers=-1",), r"hardware\.num_workers=-1 .*at least 0, or auto"),
    "no threads": (("hardware.host_threads=0",), r"hardware\.host_threads=0 .*at least 1, or auto"),
    "an unknown start": (("hardware.start_method=thread",), "'thread' is not known; use one of auto, fork"),
    "an unknown compilation": (("memory.compile=maybe",), r"memory\.compile=maybe: .*auto, blocks"),
    "compilation by its former key": (("hardware.compile=true",), r"hardware\.compile has become memory\.compile"),
    "an unknown recomputation": (("memory.recompute=maybe",), r"memory\.recompute=maybe: .*true or false or auto"),
    "an unknown kernel": (("memory.optimizer_kernel=fast",), r"memory\.optimizer_kernel=fast: .*one of keep, auto"),
    "an unknown window": (("memory.window_mean=rows",), r"memory\.window_mean=rows: .*one of batches, terms"),
    "a budget without its unit": (("memory.budget=8",), "was a unit forgotten"),
    "a negative budget": (("memory.budget=-8GiB",), "'-8GiB' cannot be read; write auto, 28GiB"),
    "micro-batches in words": (("memory.micro_batch_size=half",), r"memory\.micro_batch_size=half: .*number or auto"),
    "learning backwards": (("model.learning_rate=-1",), "learning_rate=-1 must be above 0"),
    "heads that do not divide": (("model.heads=3",), "heads=3 does not divide width=16; valid head counts"),
    "no layers": (("model.layers=0",), "layers=0 is not a size; give 1 or more"),
    "a negative width": (("model.width=-16",), "width=-16 is not a size; give 1 or more"),
    "a share above one": (("model.dropout=1.5",), r"dropout=1\.5 is not a share; give 0\.0 up to"),
    "half a row": (("data.batch_size=2.5",), r"data\.batch_size=2\.5: it must be a whole number"),
    "a batch in words": (("data.batch_size=many",), r"data\.batch_size=many: it must be a whole number"),
    "a batch of nothing": (("data.batch_size=0",), r"data\.batch_size=0: .*1 or more"),
    "sequences of nothing": (("data.sequence_length=0",), r"data\.sequence_length=0; .*at least 8"),
    "negative epochs": (("trainer.max_epochs=-5",), "max_epochs.*-5"),
    "a time in words": (("trainer.max_time=soon",), "duration='soon'.*DD:HH:MM:SS"),
    "negative clipping": (("trainer.gradient_clip_val=-1",), r"trainer\.gradient_clip_val=-1: .*or null"),
    "windows of nothing": (("trainer.accumulate_grad_batches=0",), r"trainer\.accumulate_grad_batches=0: .*1 or more"),
    "validation after nothing": (("trainer.val_check_interval=0",), r"trainer\.val_check_interval=0: .*1 or more"),
    "logs after less than nothing": (("trainer.log_every_n_steps=-1",), r"trainer\.log_every_n_steps=-1: .*0 \(never\)"),
    "checkpoints after nothing": (("callbacks.checkpoint.every_n_steps=0",), "every_n_steps=0: give a whole number, 1"),
    "an unknown mode": (("callbacks.checkpoint.mode=best",), r"checkpoint\.mode=best: .*one of min, max"),
    "a misspelt machine": (("simulate=m2-16",), "simulate=m2-16 .*did you mean m2-16gb"),
    "a machine of other hardware": (("simulate=m2-16gb", "hardware=cuda"), "hardware=cuda contradicts simulate=m2-16gb"),
    "an unknown argument": (("+model.width2=3",), r"model\.width2: .*no such argument; did you mean width"),
    "a key left out": (("~trainer.max_steps",), r"trainer\.max_steps: "),
    "a reference to nothing": (("run_dir=${nowhere}",), "nowhere"),
    "an open bracket": (("trainer.max_steps=[1",), "is not an override .*write key=value"),
    "a dict for a group": (("memory={budget:1GiB}",), "there is no such choice. memory is one of"),
    "an unknown strategy": (("trainer.strategy=unifed",), "invalid strategy name: `strategy='unifed'`"),
    "misspelt callbacks": (("callbacks=defalt",), "did you mean default"),
    "an unknown logger": (("logger=wandb",), "logger=wandb: there is no such choice. logger is one of"),
    "a folder without texts": (("data=files", "data.path=folder"), r"folder holds no \.jsonl or \.txt file"),
    "a file without a path": (("data=files",), r"data\.source=files needs data\.path"),
    "lines that are not JSON": (("data=files", "data.path=broken.jsonl"), r"broken\.jsonl:1: not JSON"),
    "an empty file": (("data=files", "data.path=empty.jsonl"), r"empty\.jsonl is empty"),
    "a table that is not there": ((*CSV, "data.path=none.csv"), r"data\.path=none\.csv does not exist; give a \.csv"),
    "a table without rows": ((*CSV, "data.path=empty.csv"), r"empty\.csv"),
    "a checkpoint to resume": (("resume=broken.ckpt",), r"resume=broken\.ckpt: that is a file; give a run directory"),
    "a run without its files": (("resume=folder",), "resume=folder: not a run directory"),
}  # fmt: skip
FAST_TRAIN = (
    "a batch of nothing",
    "a key left out",
    "a reference to nothing",
    "windows of nothing",
    "a checkpoint to resume",
)

COMMANDS = {
    "a misspelt flag": (plan, ("--modul", "x"), "--modul: there is no such flag; did you mean --module"),
    "a module without its name": (plan, ("--module", "mine", *SHAPE), r"write pkg\.mod:Name or file\.py:Name"),
    "a module that is not there": (plan, ("--module", "nope:Net", *SHAPE), "--module nope: it cannot be imported"),
    "a module's file that is not there": (plan, ("--module", "nope.py:Net", *SHAPE), "there is no such file"),
    "a misspelt module": (plan, ("--module", "mine.py:Nett", *SHAPE), "has no Nett; did you mean Net"),
    "a class that is no module": (plan, ("hardware=cpu", "--module", "mine.py:NotOne", *SHAPE), "needs a LightningModule"),
    "a misspelt argument": (plan, (*NET, "--kwargs", "widht=3", *SHAPE), "did you mean width"),
    "an argument without a value": (plan, (*NET, "--kwargs", "width", *SHAPE), "write key=value, as in width=512"),
    "an argument of another type": (plan, (*NET, "--kwargs", "width=x", *SHAPE), "give its arguments with --kwargs"),
    "no shape": (plan, (*NET, "--batch-shape", "2by4"), "2by4: this is no shape; write sizes with x"),
    "a shape without rows": (plan, (*NET, "--batch-shape", "0x4"), "batch has no rows"),
    "an unknown dtype": (plan, (*NET, "--batch-shape", "2x4:float33"), "float33 is no dtype of torch; did you mean float32"),
    "no batch": (plan, NET, "needs a batch to plan for; give --batch"),
    "two batches": (plan, (*NET, "--batch", "mine.py:Net", *SHAPE), "both define the batch; give one"),
    "no tokens": (plan, ("--generate", "0"), "--generate 0: give 1 or more"),
    "tokens in words": (plan, ("--generate", "many"), "--generate: invalid int value: 'many'"),
    "rows without tokens": (plan, ("--rows", "3"), "give --generate with them"),
    "a page that cannot be written": (plan, (*NET, *SHAPE, "--markdown", "/proc/x.md"), "/proc/x.md cannot be written"),
    "an unknown calibration": (plan, ("--calibration", "reset"), "invalid choice: 'reset'"),
    "a plan to resume": (plan, ("resume=x",), "a plan neither writes nor continues"),
    "a plan of two models": (plan, ("model.width=3", "--module", "mine.py:Net", *SHAPE), "with --module the model and its data are yours"),
    "a plan for words": (plan, ("hardware=cpu", "memory.budget=lots"), "'lots' cannot be read; write auto"),
    "a misspelt command": (main, ("plna",), "plna: there is no such command; did you mean plan"),
    "doctor with a misspelt flag": (doctor, ("--jsn",), "--jsn"),
    "doctor with a word": (doctor, ("now",), "now"),
    "watch with a misspelt flag": (watch, ("--onec",), "--onec"),
    "a report of nothing": (report, (), "directory|DIR"),
    "a report of nowhere": (report, ("nowhere",), "nowhere"),
    "a report of a folder": (report, ("folder",), "folder"),
    "classify without a checkpoint's file": (classifier, ("predict", "--checkpoint", "none.ckpt", "texts.csv"), r"none\.ckpt"),
    "classify with a broken checkpoint": (classifier, ("predict", "--checkpoint", "broken.ckpt", "texts.csv"), r"broken\.ckpt"),
    "classify in a misspelt way": (classifier, ("predct",), "predct"),
}  # fmt: skip
FAST_COMMANDS = (
    "a misspelt flag",
    "no tokens",
    "a misspelt command",
    "doctor with a misspelt flag",
    "a report of nowhere",
)


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Change to a folder with a module and broken files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")  # argparse folds its usage line
    (tmp_path / "folder").mkdir()
    (tmp_path / "mine.py").write_text(MODULE)
    texts = {
        "broken.ckpt": "x",
        "broken.jsonl": "{not json\n",
        "empty.jsonl": "",
        "empty.csv": "",
        "texts.csv": "text\nhi\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)


def is_one_line(text):
    return len([line for line in text.splitlines() if line.strip() and not line.startswith("usage:")]) == 1


@first_cells(2, "name", some(TRAIN, *FAST_TRAIN))
def test_a_wrong_override_is_answered_by_one_line(command, name):
    overrides, answer = TRAIN[name]
    done = command(*(TINY if not any(one.startswith(("data=", "model=")) for one in overrides) else ()), *overrides)

    assert (done.code, bool(re.search(answer, done.err))) == (2, True), done.err
    assert "Traceback" not in done.out + done.err
    assert is_one_line(done.err)


@pytest.mark.parametrize("name", some(COMMANDS, *FAST_COMMANDS))
def test_a_wrong_flag_is_answered_by_one_line(name, capfd):
    module, arguments, answer = COMMANDS[name]
    paths = {"config_path": CONF} if module is plan else {}
    try:
        code = module.main(list(arguments), **paths)
    except SystemExit as ended:
        code = ended.code
    done = SimpleNamespace(**capfd.readouterr()._asdict())

    assert re.search(answer, done.err), done.err
    assert code == (1 if name == "classify with a broken checkpoint" else 2)
    assert "Traceback" not in done.out + done.err
    assert is_one_line(done.err)
