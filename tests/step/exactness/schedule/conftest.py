"""Notes the checks of a run."""

import pytest

from lightning_unified.step.exactness.check import ExactnessCheck
from lightning_unified.step.exactness.trials.judge import Judge
from tests.support.runs.schedules import Checks


@pytest.fixture
def checks(monkeypatch):
    seen, check, findings = Checks(), ExactnessCheck._check, Judge.findings

    def begun(self, *args, **sizes):
        seen.steps.append(self._trainer.global_step)
        seen.rows.append([])
        seen.splits.append([])
        return check(self, *args, **sizes)

    def noted(judge, trial, rules, *, since):
        seen.rows[-1].append(trial.rows)
        seen.splits[-1].append(list(trial.split))
        return findings(judge, trial, rules, since=since)

    monkeypatch.setattr(ExactnessCheck, "_check", begun)
    monkeypatch.setattr(Judge, "findings", noted)
    return seen
