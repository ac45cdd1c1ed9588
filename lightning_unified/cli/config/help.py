"""What `--help` prints: the groups, the overrides that matter, and the configuration they make."""

from collections.abc import Sequence

from omegaconf import OmegaConf

from lightning_unified.cli.config.composition import groups
from lightning_unified.cli.config.overrides import check_overrides

__all__ = ["help_text"]

_HEAD = """\
Train a model inside a memory budget.

  {program} [group=choice …] [key=value …]

Groups (the first of a pair wins: command line > experiment > memory > hardware > model and data)
{groups}

Overrides that matter
  memory.budget=20GiB            bytes this run may use: auto, 28GiB, 60% (of the pool), "leave 6GiB" (for everything else)
  memory.micro_batch_size=4      rows at once through forward and backward, or auto
  memory.recompute=true          recompute activations in the backward pass, or auto
  data.batch_size=64             the effective batch, what the optimizer sees; memory only decides how it is cut
  hardware.precision=bf16-mixed  or 32-true, 16-mixed, auto
  trainer.max_steps=1000         and every other argument of Lightning's Trainer
  seed=1  run_dir=my/run         where everything is saved (default: runs/<model>/<time>)
  resume=runs/gearhead/<time>    go on from that run's last checkpoint; overrides beside it win
  simulate=m2-16gb               another machine's memory, limits and errors, while this one's CPU trains

Also
  -m memory=debug,small          a sweep: one run for each combination
  --cfg job                      print the configuration and stop; --info defaults: where it comes from
  --shell-completion install=bash   completion: eval "$({program} --shell-completion install=bash)"
  python -m lightning_unified doctor [--json]   what this machine has, and which tier fits

Configuration ({program} {overrides})
"""


def help_text(program: str, overrides: Sequence[str], *, multirun: bool = False) -> str:
    """Return the help for `overrides`, without resolving what only a run can know; call it inside `searching`.

    Raises:
        ConfigurationError: If they name what is not there.
    """
    config = check_overrides(overrides, multirun=multirun).config
    rows = [f"  {group:<11}{', '.join(choices)}" for group, choices in sorted(groups().items()) if _shown(group)]
    head = _HEAD.format(program=program, groups="\n".join(rows), overrides=" ".join(overrides))
    return head + OmegaConf.to_yaml(config)


def _shown(group: str) -> bool:
    return not group.startswith(("hydra", "platform"))
