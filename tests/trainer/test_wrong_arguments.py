"""One line answers a wrong Python argument: its name, its value, and what to give instead."""

import re

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_unified import (
    CudaGraphs,
    GradientHealth,
    MemoryMonitor,
    MergeRules,
    MicroBatchRules,
    PressureGuard,
    RowRules,
    RunCheckpoint,
    plan,
    predict,
    read,
    tabled_rates,
)
from lightning_unified import UnifiedStrategy as Unified
from lightning_unified.errors import ConfigurationError, LightningUnifiedError

BATCH = torch.zeros(8, 32)
FORMS = r"write auto, 28GiB, up to 28GiB, 60% \(of the pool\) or leave 6GiB"
ROWS = r'give a number of rows \(1, 2, 3, …\) or "auto"'
WHOLE = "give a whole number, 1 or more"


def fit(strategy, module=None, **flags):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(strategy=strategy, accelerator="cpu", max_steps=1, **quiet, **flags).fit(module or BoringModel())


def predicted(batch=BATCH, *, module=None, device="cpu", **how):
    return predict(BoringModel() if module is None else module, batch, device=device, **how)


def planned(budget="1GiB", *, device="cuda", **how):
    return plan(BoringModel(), BATCH, budget=budget, device=device, **how)


class ReturnsDict(BoringModel):
    def configure_micro_batches(self, stage):
        return {"unit": 1}


# what is done, and a pattern of the answer
WRONG = {
    "a budget in words": (lambda: Unified(budget="lots"), rf"'lots' cannot be read; {FORMS}"),
    "a negative budget": (lambda: Unified(budget=-5), rf"'-5' cannot be read; {FORMS}"),
    "a budget of 0": (lambda: Unified(budget=0), rf"'0' cannot be read; {FORMS}"),
    "a fraction of a byte": (lambda: Unified(budget=1.5), rf"of 1\.5 is not an amount of memory; {FORMS}"),
    "a budget without its unit": (lambda: Unified(budget=8), "'8' is 8 bytes; was a unit forgotten"),
    "more than the pool": (lambda: Unified(budget="120%"), "'120%' is not a share of a pool"),
    "no budget": (lambda: Unified(budget=None), "budget of None is not an amount"),
    "a budget that is true": (lambda: Unified(budget=True), "budget of True is not an amount"),
    "a budget that is not a number": (lambda: Unified(budget=float("nan")), "budget of nan is not an amount"),
    "an unknown unit": (lambda: Unified(budget="8GiBB"), rf"'8GiBB' cannot be read; {FORMS}"),
    "a budget above every machine": (lambda: fit(Unified(budget="900TiB")), r"above the pool of cpu.*the largest amount"),
    "more left than there is": (lambda: fit(Unified(budget="leave 900TiB")), "leaves nothing to train with.*leave less"),
    "a budget below the process": (lambda: fit(Unified(budget="20MiB")), r"this process holds .*Give \d+MiB or more"),
    "micro-batches of nothing": (lambda: Unified(micro_batch_size=0), f"micro_batch_size=0: {ROWS}"),
    "micro-batches below nothing": (lambda: Unified(micro_batch_size=-1), f"micro_batch_size=-1: {ROWS}"),
    "micro-batches of half a row": (lambda: Unified(micro_batch_size=1.5), rf"micro_batch_size=1\.5: {ROWS}"),
    "a count as text": (lambda: Unified(micro_batch_size="4"), f"micro_batch_size='4': {ROWS}"),
    "no micro-batch size": (lambda: Unified(micro_batch_size=None), f"micro_batch_size=None: {ROWS}"),
    "evaluation of nothing": (
        lambda: Unified(evaluation_micro_batch_size=0),
        f"evaluation_micro_batch_size=0: {ROWS}",
    ),
    "recompute in words": (lambda: Unified(recompute="yes"), "recompute='yes': give true, false or \"auto\""),
    "recompute as a number": (lambda: Unified(recompute=1), "recompute=1: give true, false"),
    "an unknown precision": (lambda: fit(Unified(precision="fp8")), "precision='fp8' is not known; choose one of"),
    "two precisions": (lambda: fit(Unified(precision="64-true"), precision="bf16-mixed"), "64-true.*bf16-mixed|bf16-mixed.*64-true"),
    "an unknown kernel": (lambda: Unified(optimizer_kernel="fusedd"), "did you mean fused.*choose from keep"),
    "a kernel in the backward pass": (lambda: Unified(optimizer_kernel="in-backward"), "is not offered: it writes weights"),
    "predict in words": (lambda: Unified(predict="no"), "predict='no': give true or false"),
    "recover as a number": (lambda: Unified(recover=0), "recover=0: give true or false"),
    "rollback in words": (lambda: Unified(optimizer_rollback="yes"), "optimizer_rollback='yes': give true or false"),
    "check_split in words": (lambda: Unified(check_split="off"), "check_split='off': give true or false"),
    "an unknown reaction to BatchNorm": (lambda: Unified(batch_norm="ignore"), 'batch_norm=\'ignore\': give "refuse"'),
    "an unknown window": (lambda: Unified(window_mean="rows"), 'window_mean=\'rows\': give "batches" or "terms"'),
    "rules as a dict": (lambda: Unified(micro_batches={"unit": 2}), r"give MicroBatchRules\(\.\.\.\)"),
    "a misspelt machine": (lambda: Unified(simulate="m2-16"), "simulate=m2-16 .*did you mean m2-16gb"),
    "an unknown machine": (lambda: Unified(simulate="cray"), "simulate=cray .*[tT]here are m1-8gb"),
    "a folder to remember in": (lambda: Unified(remember="/"), "remember='/': give the path of a file"),
    "a number to remember in": (lambda: Unified(remember=3), "remember=3: give the path of a file"),
    "two devices": (lambda: fit(Unified(), devices=2), 'one device and was given 2.*strategy="unified_ddp"'),
    "an unknown device": (lambda: predicted(device="tpu"), "device='tpu': steps are predicted for cpu, cuda"),
    "no device's name": (lambda: predicted(device=""), "device='': steps are predicted for"),
    "a prediction of no rows": (lambda: predicted(micro_batch_size=0), f"micro_batch_size=0: {WHOLE}"),
    "a prediction of auto": (lambda: predicted(micro_batch_size="auto"), f"micro_batch_size='auto': {WHOLE}"),
    "a prediction of half a row": (lambda: predicted(micro_batch_size=1.5), rf"micro_batch_size=1\.5: {WHOLE}"),
    "a prediction in fp8": (lambda: predicted(precision="fp8"), "precision 'fp8' cannot be traced; choose from"),
    "blocks in words": (lambda: predicted(recompute="all"), "recompute='all': give True, False or None"),
    "an unknown kernel to predict": (lambda: predicted(optimizer_kernel="fast"), "give one of fused, foreach"),
    "a chunk that the module lacks": (lambda: predicted(loss_chunk=8), "loss_chunk=8: .*has no attribute loss_chunk_rows"),
    "a machine's name as rates": (lambda: predicted(rates="m2-16gb"), r"give Rates, as in tabled_rates\('m2-16gb'\)"),
    "a number as rates": (lambda: planned(rates=3), "rates=3: give Rates, or None"),
    "a Trainer's name": (lambda: predicted(trainer="mine"), r"trainer is a str: give a lightning\.Trainer"),
    "a class for a module": (lambda: predicted(module=BoringModel), r"the class BoringModel.*write BoringModel\(\.\.\.\)"),
    "a plain torch module": (lambda: predicted(module=torch.nn.Linear(1, 1)), "a Linear: give an instance of a LightningModule"),
    "a module's name": (lambda: predicted(module="gearhead"), "a str: give an instance of a LightningModule"),
    "no batch": (lambda: predicted(None), "batch is a NoneType: give one whole batch"),
    "a loader for a batch": (lambda: predicted(torch.utils.data.DataLoader(BATCH)), r"next\(iter\(loader\)\)"),
    "a batch without rows": (lambda: predicted(BATCH[:0]), "batch has no rows"),
    "a batch of another shape": (lambda: predicted(torch.zeros(8, 5)), r"BoringModel cannot be run.*\[8, 5\] X \[32, 2\]"),
    "a plan for words": (lambda: planned("lots"), rf"'lots' cannot be read; {FORMS}"),
    "a plan below nothing": (lambda: planned(-1), rf"'-1' cannot be read; {FORMS}"),
    "a plan for 8 bytes": (lambda: planned(8), "was a unit forgotten"),
    "a plan for a float": (lambda: planned(1e9), "is not an amount of memory"),
    "a plan for true": (lambda: planned(True), "budget of True is not an amount"),
    "a share of what is not here": (lambda: planned("60%", device="mps"), "depends on mps, which is not here; give an amount"),
    "auto of what is not here": (lambda: planned("auto", device="mps"), "depends on mps, which is not here; give an amount"),
    "a plan for a GPU": (lambda: planned(device="gpu"), "device='gpu': steps are predicted for cpu, cuda"),
    "a plan with an unknown kernel": (lambda: planned(optimizer_kernel="fast"), "choose from keep, auto, fused"),
    "a plan with some recomputation": (lambda: planned(recompute="some"), "recompute='some': give True, False or 'auto'"),
    "a plan of no rows": (lambda: planned(micro_batch_size=0), f"micro_batch_size=0: {WHOLE}"),
    "a unit of nothing": (lambda: MicroBatchRules(unit=0), r"\(unit=0\): give a positive number of rows"),
    "a unit as text": (lambda: MicroBatchRules(unit="2"), r"\(unit='2'\): give a positive number"),
    "a number as weight": (lambda: MicroBatchRules(loss_weight=3), r"\(loss_weight=3\): give a function"),
    "a sum in words": (lambda: MicroBatchRules(loss_is_sum="yes"), "give True or False"),
    "text to prepare with": (lambda: MicroBatchRules(prepare="x"), r"\(prepare='x'\): give a function"),
    "splittable in words": (lambda: MicroBatchRules(splittable="no"), "give True or False"),
    "an encoder without a tuple": (lambda: MicroBatchRules(encoders="net"), "give a tuple of names"),
    "a missing encoder": (
        lambda: fit(Unified(micro_batches=MicroBatchRules(encoders=("nett",)), micro_batch_size=1)),
        "names 'nett', and BoringModel has no such submodule; give names",
    ),
    "a rule's BatchNorm": (lambda: MicroBatchRules(batch_norm="ignore"), 'give "refuse" or "micro"'),
    "a check in words": (lambda: MicroBatchRules(check="no"), "give True, False or None"),
    "rows as a dict": (lambda: MicroBatchRules(rows={"count": 1}), r"give RowRules\(\.\.\.\)"),
    "a merge as text": (lambda: MicroBatchRules(merge="mean"), r"give MergeRules\(\.\.\.\)"),
    "a number of rows": (lambda: RowRules(count=3), r"RowRules\(count=3\): give a function"),
    "a shared name": (lambda: RowRules(shared="x"), r"RowRules\(shared='x'\): give a tuple of names"),
    "one rule for all outputs": (lambda: MergeRules(outputs="mean"), "give a dict of names and rules"),
    "an unknown rule": (lambda: MergeRules(logs={"loss": "average"}), "give one of 'concatenate', 'mean'"),
    "a unit above the micro-batch": (
        lambda: fit(Unified(micro_batches=MicroBatchRules(unit=4), micro_batch_size=2)),
        "micro_batch_size=2 is less than the 4 rows .*give 4 or more",
    ),
    "a hook that returns a dict": (lambda: fit(Unified(), ReturnsDict()), r"returned \{'unit': 1\}; return MicroBatchRules"),
    "a monitor of no batches": (lambda: MemoryMonitor(every_n_batches=0), f"MemoryMonitor: every_n_batches=0: {WHOLE}"),
    "a monitor of words": (lambda: MemoryMonitor(every_n_batches="x"), f"every_n_batches='x': {WHOLE}"),
    "no patience": (lambda: GradientHealth(patience=0), f"GradientHealth: patience=0: {WHOLE}"),
    "half a check": (lambda: GradientHealth(check_every=0.5), rf"GradientHealth: check_every=0\.5: {WHOLE}"),
    "no seconds": (lambda: PressureGuard(every_s=0), "PressureGuard: every_s=0: give seconds, more than 0"),
    "seconds as text": (lambda: PressureGuard(every_s="1"), "PressureGuard: every_s='1': give seconds"),
    "no samples": (lambda: PressureGuard(samples=0), f"PressureGuard: samples=0: {WHOLE}"),
    "checkpoints after no steps": (lambda: RunCheckpoint(every_n_steps=0), f"RunCheckpoint: every_n_steps=0: {WHOLE}"),
    "files to keep as text": (lambda: RunCheckpoint(keep="3"), f"RunCheckpoint: keep='3': {WHOLE}"),
    "the best mode": (lambda: RunCheckpoint(mode="best"), "mode='best' is not known; use 'min' or 'max'"),
    "no graphs": (lambda: CudaGraphs(most=0), f"CudaGraphs: most=0: {WHOLE}"),
    "graphs of a number": (lambda: CudaGraphs(of=3), "CudaGraphs: of=3: give a submodule's name"),
    "a reading of a TPU": (lambda: read("tpu"), "device 'tpu' has no reader; use auto, cpu"),
    "rates of a number": (lambda: tabled_rates(3), "give a machine's or a device's name"),
}  # fmt: skip

# Lightning and Python answer these themselves, with the name of the argument.
OTHERS = {
    "a misspelt argument": (lambda: Unified(bugdet="8GiB"), TypeError, "unexpected keyword argument 'bugdet'"),
    "a misspelt rule": (lambda: MicroBatchRules(units=1), TypeError, "unexpected keyword argument 'units'"),
    "a plan without a budget": (lambda: plan(BoringModel(), BATCH, device="cpu"), TypeError, "argument: 'budget'"),
    "a misspelt strategy": (lambda: fit("unifed"), ValueError, "invalid strategy name: `strategy='unifed'`"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_answered_by_one_line(name):
    call, answer = WRONG[name]
    with pytest.raises(LightningUnifiedError) as refused:
        call()

    assert re.search(answer, str(refused.value)), str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert isinstance(refused.value, ConfigurationError) or "cannot be" in str(refused.value)


@pytest.mark.parametrize("name", OTHERS)
def test_python_and_lightning_answer_the_rest(name):
    call, error, answer = OTHERS[name]
    with pytest.raises(error, match=answer):
        call()
