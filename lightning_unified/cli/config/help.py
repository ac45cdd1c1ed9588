"""The text of `train --help`: groups, the main overrides, and the composed configuration."""

from collections.abc import Sequence

from omegaconf import OmegaConf

from lightning_unified.cli.config.composition import groups
from lightning_unified.cli.config.overrides import check_overrides

__all__ = ["groups_in_words", "help_text"]

_HEAD = """\
Train a model inside a memory budget.

  {program} [group=choice …] [key=value …]

Groups (precedence: command line > experiment > memory > hardware > model and data)
{groups}

Main overrides
  memory.budget=20GiB            bytes this run may use: auto, 28GiB, 60% (of the pool), "leave 6GiB" (for other programs)
  memory.micro_batch_size=4      rows that run through forward and backward at once, or auto
  memory.recompute=true          activation checkpointing: recompute activations in backward, or auto
  data.batch_size=64             the effective batch, which the optimizer sees; memory only decides how it is split
  hardware.precision=bf16-mixed  or 32-true, 16-mixed, auto
  trainer.max_steps=1000         and every other argument of Lightning's Trainer
  seed=1  run_dir=my/run         the folder that the run saves to (default: runs/<model>/<time>)
  resume=runs/gearhead/<time>    continue from that run's last checkpoint; overrides given beside it win
  run_dir=runs/mine resume=auto  begin or continue what that folder holds; with -m, leave out the runs that are done
  simulate=m2-16gb               imitate another machine's memory, limits and errors; this machine's CPU trains

Also
  -m memory=debug,small          run a sweep: one run for each combination
  --trust                        resume a run whose files name classes of your own (docs/explanation/security.md)
  --cfg job                      print the configuration and stop; --info defaults: print its sources
  --shell-completion install=bash   completion: eval "$({program} --shell-completion install=bash)"
  python -m lightning_unified doctor [--json]   show this machine's memory and the tier that fits

Configuration ({program} {overrides})
"""


def help_text(program: str, overrides: Sequence[str], *, multirun: bool = False) -> str:
    """Return the help for `overrides`, with the values unresolved that only a run knows.

    Call it inside `searching`.

    Raises:
        ConfigurationError: If an override names an unknown group, choice or key.
    """
    config = check_overrides(overrides, multirun=multirun).config
    head = _HEAD.format(program=program, groups=groups_in_words(), overrides=" ".join(overrides))
    return head + OmegaConf.to_yaml(config)


def groups_in_words() -> str:
    """Return a line for each group that a user chooses from; call it inside `searching`."""
    shown = {
        name: choices
        for name, choices in sorted(groups().items())
        if not name.startswith(("hydra", "model_callbacks", "platform"))
    }
    return "\n".join(f"  {name:<11}{', '.join(choices)}" for name, choices in shown.items())
