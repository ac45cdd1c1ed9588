"""The examples of docs/reference/micro_batches.md run, and train as the whole batch does."""

import contextlib
import copy
import re
import warnings
from dataclasses import fields

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_unified import MicroBatchRules, RowRules
from lightning_unified.errors import SplitError
from tests.support import ROOT

PAGE = ROOT / "docs" / "reference" / "micro_batches.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
INEXACT = {"Norm", "Unchecked"}  # the user accepts a difference


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names that the page defines, once all its examples have run.

    `trained` has each module that was split, beside its copy trained whole.
    """
    names = {"__name__": "page", "trained": []}
    with warnings.catch_warnings(), contextlib.chdir(tmp_path_factory.mktemp("page")):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        exec(compile(BLOCKS[0], f"{PAGE}: shared code", "exec"), names)
        train = names["train"]

        def both(module, loader, micro_batch_size=4, **options):
            before, state = copy.deepcopy(module), torch.get_rng_state()
            strategy = train(module, loader, micro_batch_size, **options)
            torch.set_rng_state(state)
            train(before, loader, "auto", **options)
            names["trained"].append((module, before, strategy))
            return strategy

        names["train"] = both
        for number, block in enumerate(BLOCKS[1:], 2):
            exec(compile(block, f"{PAGE}: example {number}", "exec"), names)
        yield {**names, "train": train}


def test_every_example_runs_and_trains_as_the_whole_batch(page):
    assert len(page["trained"]) >= len(BLOCKS) - 4
    for split, whole, strategy in page["trained"]:
        differs = any(
            not torch.allclose(one, other, rtol=1e-5, atol=1e-6)
            for one, other in zip(split.parameters(), whole.parameters(), strict=True)
        )
        assert differs == (type(split).__name__ in INEXACT), f"{type(split).__name__}: {strategy.events}"


def test_without_its_rules_an_example_is_refused(page):
    examples = [page[name] for name in ("Weighted", "Groups", "Contrastive", "Norm", "Unchecked", "Theirs")]
    loader = page["batches"](x=page["x"], y=page["y"], weight=torch.rand(64))
    for kind in examples:
        with pytest.raises(SplitError):
            page["train"](kind(), loader, micro_batches=MicroBatchRules())
    for kind, batches in ((page["Graph"], page["several"]), (page["Counted"], page["loader"].dataset)):
        with pytest.raises(SplitError, match="RowRules"):
            page["train"](kind(), DataLoader(batches, batch_size=None), micro_batches=MicroBatchRules())


def test_a_merge_rule_gives_the_whole_batchs_log(page):
    figures = []
    for size in (4, "auto"):
        torch.manual_seed(0)
        strategy, module = page["UnifiedStrategy"](micro_batch_size=size), page["Regression"]()
        trainer = page["L"].Trainer(
            strategy=strategy, accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False
        )
        trainer.fit(module, page["batches"](x=page["x"], y=page["y"]))
        figures.append(float(trainer.callback_metrics["rmse"]))

    assert figures[0] == pytest.approx(figures[1], rel=1e-5)


def test_every_argument_of_the_rules_has_an_example():
    text = "\n".join(BLOCKS)
    missing = [one.name for kind in (MicroBatchRules, RowRules) for one in fields(kind) if f"{one.name}=" not in text]

    assert missing == []
