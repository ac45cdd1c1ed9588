"""A sweeper on current Optuna: `hydra/sweeper=optuna`. Hydra's own (1.3.0) needs Optuna 2."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

__all__ = ["OptunaSweeper", "direction_of", "drawn", "register"]


def direction_of(config: Any) -> str:
    """Return the direction of the metric that decides `best.ckpt`: "maximize" or "minimize"."""
    return "maximize" if OmegaConf.select(config, "callbacks.checkpoint.mode") == "max" else "minimize"


def drawn(trial: Any, override: Override, config: Any) -> str:
    """Return `key=value` with a value drawn by `trial`.

    The value is an integer if the key of `config` holds one.
    """
    key, sweep = override.get_key_element(), override.value()
    name = key.lstrip("+")
    if isinstance(sweep, IntervalSweep):
        is_whole = int in (type(sweep.start), type(OmegaConf.select(config, name)))
        draw, number = (trial.suggest_int, int) if is_whole else (trial.suggest_float, float)
        return f"{key}={draw(name, number(sweep.start or 0), number(sweep.end or 0), log='log' in sweep.tags)}"
    texts = list(override.sweep_string_iterator())
    if isinstance(sweep, RangeSweep) and all(text.lstrip("-").isdigit() for text in texts):
        return f"{key}={trial.suggest_int(name, int(texts[0]), int(texts[-1]), step=int(sweep.step))}"
    return f"{key}={trial.suggest_categorical(name, texts)}"


class OptunaSweeper(Sweeper):
    """Run `n_trials` runs, of which `n_jobs` are drawn together.

    docs/how-to/sweeps.md lists the settings and overrides.
    """

    __module__ = "hydra_plugins.lightning_unified"  # Hydra accepts plugins of that package only

    def __init__(self, *, n_trials: int, n_jobs: int, seed: int | None, **study: Any) -> None:
        self._trials, self._at_once, self._seed, self._study = n_trials, max(n_jobs, 1), seed, study

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Keep the objects that `sweep` needs; Hydra calls this on each sweeper."""
        self.hydra_context, self.config, self._context, self._config = hydra_context, config, hydra_context, config
        self._launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials; a run without a finite result counts as failed."""
        from optuna import create_study, samplers

        given = OverridesParser.create(self._context.config_loader).parse_overrides(arguments)
        varied = [one for one in given if one.is_sweep_override()]
        fixed = [one.input_line for one in given if one not in varied]
        self._study["direction"] = self._study.get("direction") or direction_of(self._config)
        study = create_study(sampler=samplers.TPESampler(seed=self._seed), load_if_exists=True, **self._study)
        (folder := Path(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self._config, folder / "multirun.yaml")
        for first in range(0, self._trials, self._at_once):
            trials = [study.ask() for _ in range(min(self._at_once, self._trials - first))]
            jobs = [[*fixed, *(drawn(trial, one, self._config) for one in varied)] for trial in trials]
            self.validate_batch_is_legal(jobs)
            for trial, run in zip(trials, self._launcher.launch(jobs, initial_job_idx=first), strict=True):
                study.tell(trial, run.return_value)
        for best in study.best_trials[:1]:  # empty if all trials failed
            found = {"name": "optuna", "best_params": best.params, "best_value": best.value}
            OmegaConf.save(OmegaConf.create(found), folder / "optimization_results.yaml")


def register() -> None:
    """Register the sweeper in `hydra_plugins`; an editable installation does not contain it."""
    plugins = Plugins.instance()  # imports the plugins that are installed, maybe Hydra's own Optuna sweeper
    sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    sys.modules[OptunaSweeper.__module__] = sys.modules[__name__]
    plugins.register(OptunaSweeper)
    options = {"n_trials": 20, "n_jobs": 1, "direction": None, "seed": None, "storage": None, "study_name": None}
    node = {"_target_": f"{OptunaSweeper.__module__}.OptunaSweeper", **options}
    ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=node, provider="lightning_unified")
