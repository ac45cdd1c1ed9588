"""A sweeper for Hydra that draws values with Optuna: `train.py -m hydra/sweeper=optuna`.

Hydra's own Optuna sweeper needs Optuna 2; its last stable release is 1.3.0. This sweeper works with current Optuna.
"""

import sys
from collections.abc import Sequence
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

__all__ = ["OptunaSweeper", "register"]


class OptunaSweeper(Sweeper):
    """Runs `n_trials` runs, and writes the best values to `optimization_results.yaml` in the sweep's folder.

    `key=interval(1e-5,1e-3)` draws a number, `tag(log,interval(…))` its logarithm, `int(interval(1,8))` or a plain interval for a key that
    holds an integer an integer, `range(1,9,2)` one of evenly spaced integers, and `choice(a,b)` or `a,b` one of the given values.

    Args:
        n_trials: The number of runs.
        n_jobs: Runs drawn at once. The launcher decides whether they run at the same time.
        direction: `"minimize"` or `"maximize"`.
        seed: The seed of the sampler; None for a random one.
        storage: Optuna's storage URL; None keeps trials in memory.
        study_name: The name of the study in `storage`.
    """

    def __init__(
        self,
        *,
        n_trials: int,
        n_jobs: int,
        direction: str,
        seed: int | None,
        storage: str | None,
        study_name: str | None,
    ) -> None:
        self._trials, self._at_once, self._seed = n_trials, max(n_jobs, 1), seed
        self._study = {"direction": direction, "storage": storage, "study_name": study_name, "load_if_exists": True}

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        """Keep what `sweep` needs, as Hydra asks of a sweeper."""
        self._config, self._loader = config, hydra_context.config_loader
        self.hydra_context, self.config = hydra_context, config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the trials; a run without a finite result counts as failed."""
        try:
            import optuna
        except ImportError as error:
            raise ConfigurationError(
                "hydra/sweeper=optuna needs Optuna: pip install 'lightning-unified[sweep]'."
            ) from error
        parsed = OverridesParser.create(self._loader).parse_overrides(arguments)
        fixed = [one.input_line for one in parsed if not one.is_sweep_override()]
        varied = [one for one in parsed if one.is_sweep_override()]
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self._seed), **self._study)
        folder = Path(self._config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self._config, folder / "multirun.yaml")
        for first in range(0, self._trials, self._at_once):
            trials = [study.ask() for _ in range(min(self._at_once, self._trials - first))]
            jobs = [[*fixed, *(self._drawn(trial, one) for one in varied)] for trial in trials]
            self.validate_batch_is_legal(jobs)
            for trial, run in zip(trials, self._launcher.launch(jobs, initial_job_idx=first), strict=True):
                study.tell(trial, run.return_value)
        if not any(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.trials):
            return
        best = {"name": "optuna", "best_params": study.best_params, "best_value": study.best_value}
        OmegaConf.save(OmegaConf.create(best), folder / "optimization_results.yaml")

    def _drawn(self, trial: Any, override: Override) -> str:
        """Return the override `key=value` with a value that `trial` draws."""
        key, sweep = override.get_key_element(), override.value()
        plain = key.lstrip("+")
        if isinstance(sweep, IntervalSweep):
            default = OmegaConf.select(self._config, plain)
            whole = type(sweep.start) is int or type(default) is int
            draw = trial.suggest_int if whole else trial.suggest_float
            low, high = (int(limit) if whole else limit for limit in (sweep.start or 0, sweep.end or 0))
            return f"{key}={draw(plain, low, high, log='log' in sweep.tags)}"
        texts: Sequence[str] = list(override.sweep_string_iterator())
        if isinstance(sweep, RangeSweep) and all(text.lstrip("-").isdigit() for text in texts):
            return f"{key}={trial.suggest_int(plain, int(texts[0]), int(texts[-1]), step=int(sweep.step))}"
        return f"{key}={trial.suggest_categorical(plain, texts)}"


_PLUGIN = "hydra_plugins.lightning_unified"


def register() -> None:
    """Make the sweeper known to Hydra as `hydra/sweeper=optuna`, also where Hydra's own Optuna sweeper is installed.

    Hydra accepts plugins of the namespace package `hydra_plugins` only, and does not find those of an editable installation. So the module
    is made here.
    """
    plugins = Plugins.instance()  # imports the plugins that are installed
    package, module = sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins")), ModuleType(_PLUGIN)
    OptunaSweeper.__module__ = _PLUGIN
    vars(module)["OptunaSweeper"] = OptunaSweeper
    vars(package)["lightning_unified"] = sys.modules[_PLUGIN] = module
    plugins.register(OptunaSweeper)
    settings = {"n_trials": 20, "n_jobs": 1, "direction": "minimize", "seed": None, "storage": None, "study_name": None}
    node = {"_target_": f"{_PLUGIN}.OptunaSweeper", **settings}
    ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=node, provider="lightning_unified")
