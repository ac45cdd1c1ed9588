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

from lightning_unified.errors import ConfigurationError

__all__ = ["OptunaSweeper", "direction_of", "register"]

_PLUGIN = "hydra_plugins.lightning_unified"
_DEFAULTS = {"n_trials": 20, "n_jobs": 1, "direction": None, "seed": None, "storage": None, "study_name": None}


def direction_of(config: Any) -> str:
    """Return the direction of the metric that decides `best.ckpt`: "maximize" or "minimize"."""
    return "maximize" if OmegaConf.select(config, "callbacks.checkpoint.mode") == "max" else "minimize"


class OptunaSweeper(Sweeper):
    """Runs `n_trials` runs, drawn `n_jobs` at once.

    It writes the best values to `optimization_results.yaml`.

    The objective is the metric that decides `best.ckpt`, and `callbacks.checkpoint.mode` is its direction unless `direction` is given.
    docs/how-to/sweeps.md describes the settings, and the overrides that draw: `interval`, `tag(log,…)`, `int(…)`, `range` and `choice`.
    """

    def __init__(self, *, n_trials: int, n_jobs: int, seed: int | None, **study: Any) -> None:
        self._trials, self._at_once, self._seed, self._study = n_trials, max(n_jobs, 1), seed, study

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Keep what `sweep` needs, as Hydra asks of a sweeper."""
        self.hydra_context, self.config, self._config = hydra_context, config, config
        self._loader, parts = hydra_context.config_loader, {"hydra_context": hydra_context, "config": config}
        self._launcher = Plugins.instance().instantiate_launcher(task_function=task_function, **parts)

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials; a run without a finite result counts as failed."""
        try:
            import optuna
        except ImportError as error:
            text = "hydra/sweeper=optuna needs Optuna: pip install 'lightning-unified[sweep]'."
            raise ConfigurationError(text) from error
        parsed = OverridesParser.create(self._loader).parse_overrides(arguments)
        fixed = [one.input_line for one in parsed if not one.is_sweep_override()]
        varied = [one for one in parsed if one.is_sweep_override()]
        sampler = optuna.samplers.TPESampler(seed=self._seed)
        settings = {**self._study, "direction": self._study.get("direction") or direction_of(self._config)}
        study = optuna.create_study(sampler=sampler, load_if_exists=True, **settings)
        folder = Path(self._config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self._config, folder / "multirun.yaml")
        for first in range(0, self._trials, self._at_once):
            trials = [study.ask() for _ in range(min(self._at_once, self._trials - first))]
            jobs = [[*fixed, *(self._drawn(trial, one) for one in varied)] for trial in trials]
            self.validate_batch_is_legal(jobs)
            for trial, run in zip(trials, self._launcher.launch(jobs, initial_job_idx=first), strict=True):
                study.tell(trial, run.return_value)
        if any(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.trials):
            best = {"name": "optuna", "best_params": study.best_params, "best_value": study.best_value}
            OmegaConf.save(OmegaConf.create(best), folder / "optimization_results.yaml")

    def _drawn(self, trial: Any, override: Override) -> str:
        """Return the override `key=value` with a value that `trial` draws.

        It is an integer if the key holds one.
        """
        key, sweep = override.get_key_element(), override.value()
        name = key.lstrip("+")
        if isinstance(sweep, IntervalSweep):
            whole = type(sweep.start) is int or type(OmegaConf.select(self._config, name)) is int
            low, high = (int(limit) if whole else limit for limit in (sweep.start or 0, sweep.end or 0))
            draw = trial.suggest_int if whole else trial.suggest_float
            return f"{key}={draw(name, low, high, log='log' in sweep.tags)}"
        texts = list(override.sweep_string_iterator())
        if isinstance(sweep, RangeSweep) and all(text.lstrip("-").isdigit() for text in texts):
            return f"{key}={trial.suggest_int(name, int(texts[0]), int(texts[-1]), step=int(sweep.step))}"
        return f"{key}={trial.suggest_categorical(name, texts)}"


def register() -> None:
    """Register the sweeper as a module of `hydra_plugins`, where an editable installation has none."""
    plugins = Plugins.instance()  # imports the plugins that are installed, maybe Hydra's own Optuna sweeper
    package, module = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins")), ModuleType(_PLUGIN)
    OptunaSweeper.__module__ = _PLUGIN
    vars(module)["OptunaSweeper"] = OptunaSweeper
    vars(package)["lightning_unified"] = sys.modules[_PLUGIN] = module
    plugins.register(OptunaSweeper)
    node = {"_target_": f"{_PLUGIN}.OptunaSweeper", **_DEFAULTS}
    ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=node, provider="lightning_unified")
