"""`events.jsonl` and the logged speed: a killed run has written its events so far."""

import json
from importlib.metadata import version

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from lightning_unified.cli.run import throughput
from lightning_unified.cli.run.journal import Journal
from lightning_unified.cli.run.throughput import Throughput
from lightning_unified.strategies import UnifiedStrategy

pytestmark = pytest.mark.filterwarnings("ignore")


class Wide(LightningModule):
    """Runs out of memory with more rows than it `fits`."""

    def __init__(self, fits):
        super().__init__()
        self.layer, self.fits = torch.nn.Linear(4, 1), fits

    def training_step(self, batch, batch_idx):
        if len(batch) > self.fits:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def fit(folder, *callbacks, fits=8, **options):
    trainer = Trainer(
        accelerator="cpu",
        strategy=UnifiedStrategy(check_split=False),
        callbacks=list(callbacks),
        default_root_dir=folder,
        max_steps=3,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **{"logger": False, **options},
    )
    trainer.fit(Wide(fits), DataLoader(torch.randn(64, 4), batch_size=8))


def lines(folder):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_run_records_its_start_and_its_end(tmp_path):
    fit(tmp_path, Journal())
    began, ended = lines(tmp_path)

    assert (began["kind"], began["step"], ended["kind"], ended["step"]) == ("began", 0, "ended", 3)
    assert began["machine"]["held"]["weights"] == 5 * 4
    assert began["machine"]["versions"]["torch"] == version("torch")
    assert began["machine"]["low_bytes"] < began["machine"]["high_bytes"] == began["budget_bytes"]
    assert ended["micro_batch_size"] == 8
    assert "precision" in began["plan"]


def test_a_recovery_is_recorded_with_the_step_of_its_metrics(tmp_path):
    fit(tmp_path, Journal(), fits=4)
    _, event, ended = lines(tmp_path)

    assert (event["kind"], event["step"], event["recoveries"], event["micro_batch_size"]) == ("event", 0, 1, 4)
    assert (
        event["text"] == "out of memory in forward with a micro-batch of 8 rows; repeated with micro-batches of 4 rows"
    )
    assert ended["recoveries"] == 1


def test_a_failed_run_records_its_error(tmp_path):
    with pytest.raises(Exception, match="out of memory"):
        fit(tmp_path, Journal(), fits=0)

    assert lines(tmp_path)[-1]["kind"] == "failed"
    assert lines(tmp_path)[-1]["text"].startswith("OutOfMemoryError: ")
    assert lines(tmp_path)[-1]["plan"] is not None


def test_a_resumed_run_appends_to_the_recorded_events(tmp_path):
    fit(tmp_path, Journal())
    fit(tmp_path, Journal())

    assert [line["kind"] for line in lines(tmp_path)] == ["began", "ended", "began", "ended"]


def test_a_trial_leaves_nothing(tmp_path):
    fit(tmp_path, Journal(), fast_dev_run=True)

    assert not (tmp_path / "events.jsonl").exists()


def test_a_disk_that_refuses_does_not_end_the_run(tmp_path, caplog):
    (tmp_path / "events.jsonl").mkdir()
    fit(tmp_path, Journal())

    assert caplog.text.count("no longer written to") == 1


def test_speed_is_logged_every_few_batches_under_the_step_of_their_last(tmp_path):
    rows = []
    logger = DummyLogger()
    logger.log_metrics = lambda metrics, step=None: rows.append((step, dict(metrics)))
    fit(tmp_path, Throughput(), logger=logger, log_every_n_steps=2)
    ((step, speed),) = [(step, row) for step, row in rows if "speed/samples_per_second" in row]

    assert step == 1
    assert speed["speed/samples_per_second"] * speed["speed/seconds_per_batch"] == pytest.approx(8)


def test_of_texts_with_one_label_each_the_tokens_are_counted_and_not_the_labels():
    mask = torch.tensor([[True, True, True], [True, False, False]])

    assert throughput._tokens({"labels": torch.tensor([1, 0]), "attention_mask": mask}) == 4
    assert throughput._tokens({"labels": torch.tensor([[-100, 3, 4]]), "attention_mask": mask[:1]}) == 2
