"""Plans of fine-tuning need no weights, and a simulated run takes the predicted memory."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_unified import UnifiedStrategy, plan
from lightning_unified.cost_model.rates import tabled_rates
from lightning_unified.hardware import resolve_budget
from lightning_unified.hardware.simulated import SimulatedMachine
from lightning_unified.models.causal_lm.presets import MODELS
from lightning_unified.models.finetune import Finetune, FinetuneData
from tests.support import ROOT
from tests.support.finetune import build, write_rows
from tests.support.lanes import first_cells, slow

pytest.importorskip("transformers")
pytest.importorskip("peft")
SHAPE = {
    "model_type": "qwen2", "vocab_size": 2000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
CAPPED = {"model_type": "gemma3_text", "head_dim": 16, "final_logit_softcapping": 30.0}


@first_cells(1, "name", [name for name in MODELS if name != "smollm2_135m"])
def test_every_preset_is_a_choice_of_model_and_data(name):
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        chosen = compose("train", overrides=[f"model=finetune/{name}"], return_hydra_config=True)

    assert chosen.model.preset == name
    assert chosen.model.pretrained == chosen.data.pretrained == MODELS[name].pretrained
    assert {path.stem for path in Path(ROOT / "conf/model/finetune").glob("*.yaml")} == {*MODELS} - {"smollm2_135m"}


@pytest.mark.parametrize("packing", [False, True])
def test_an_example_batch_has_the_form_of_the_data(tmp_path, packing):
    rows = [{"prompt": f"{number} is ", "completion": "a number " * 30} for number in range(12)]
    made = FinetuneData(path=write_rows(tmp_path / "a.jsonl", rows), packing=packing, sequence_length=128, batch_size=2)
    batch, example = next(iter(made.train_dataloader())), made.example_batch()
    module = build(architecture=SHAPE, lora_rank=2)
    prepared, largest = module.prepare_batch(batch), module.largest_batch(example)

    assert example.keys() == batch.keys()
    assert largest.keys() == prepared.keys()
    assert all(largest[name].shape[1] >= prepared[name].shape[1] for name in ("tokens", "places", "targets"))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [slow({}), CAPPED], ids=["qwen2", "gemma3"])
def test_a_simulated_mac_takes_the_predicted_memory(tmp_path, changes):
    class Kept(Finetune):
        plans = []

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.plans.append(getattr(self.trainer.strategy, "plan", None))

    torch.manual_seed(0)
    tokens = torch.randint(2000, (8, 384))
    loader = DataLoader(tokens, 4, collate_fn=lambda rows: {"tokens": torch.stack(rows), "labels": torch.stack(rows)})
    module = Kept(preset="finetune-tiny", architecture={**SHAPE, **changes}, lora_rank=8, schedule="constant")
    options = {"micro_batch_size": 2, "loss_chunk": False, "check_split": False}
    strategy = UnifiedStrategy(simulate="m2-16gb", budget="512MiB", **options)
    trainer = Trainer(
        max_steps=2, accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, loader)

    assert module.plans[-1].micro_batch_size == 2
    assert strategy.simulated.allocator.peak == pytest.approx(module.plans[-1].prediction.peak_bytes, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "length"), [("qwen2_5_0_5b", 1024), ("llama3_2_1b", 512)])
def test_sixteen_rows_fit_a_mac_with_16_gib_beside_6_gib_for_everything_else(preset, length):
    with torch.device("meta"):
        module = Finetune(preset=preset, dtype="bfloat16")
    tokens = torch.zeros(16, length, dtype=torch.long)
    budget = resolve_budget("leave 6GiB", SimulatedMachine("m2-16gb").reading()).bytes
    batch = module.largest_batch({"tokens": tokens, "labels": tokens})
    options = {"device": "mps", "precision": "bf16-mixed", "rates": tabled_rates("m2-16gb")}
    found = plan(module, batch, budget=budget, **options)

    assert found.prediction.reserved_bytes <= budget <= 5 * 2**30
