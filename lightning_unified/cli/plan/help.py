"""What `plan --help` prints."""

from lightning_unified.cli.plan.arguments import FLAGS
from lightning_unified.cli.request.composition import groups

__all__ = ["help_text"]

_HEAD = """\
Say what a training step will take before there is one, and the fastest way to run it inside a memory budget.
No weight is allocated, no data is read, nothing is written.

  python -m lightning_unified plan [group=choice …] [key=value …] [flags]

  plan memory=large hardware=mps model=gearhead-34m         an Apple GPU that may not be here
  plan model=gearhead simulate=m2-16gb memory.budget=6GiB   a machine by its name
  plan model=gearhead-118m --fits-where                     every machine that can be simulated
  plan model=gearhead --generate 128 --rows 16              what generating takes as well
  plan hardware=cpu --module my.models:Net --kwargs width=512 --batch-shape 32x3x224x224
  plan --module train.py:build --batch train.py:example_batch --png plan.png

Overrides are those of train (python -m lightning_unified train --help); groups:
{groups}

Flags
{flags}

Completion in bash: eval "$(python -m lightning_unified plan --shell-completion install=bash)"
Exit codes: 0 planned; 1 nothing fits, with a table of what would; 2 what was asked makes no sense.
"""


def help_text() -> str:
    """Return the help; call it inside `searching`."""
    shown = [
        f"  {name:<11}{', '.join(choices)}"
        for name, choices in sorted(groups().items())
        if not name.startswith(("hydra", "platform"))
    ]
    flags = [f"  {f'{flag} {value}':<32}{words}" for flag, (value, words) in FLAGS.items()]
    return _HEAD.format(groups="\n".join(shown), flags="\n".join(flags))
