"""`plan`: compose the configuration, build the module without weights, plan, and show the plan."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, open_dict

from lightning_unified.cli.config.binding import check_binding
from lightning_unified.cli.config.composition import PACKAGED, searching
from lightning_unified.cli.config.overrides import check_overrides, key_of, parse_overrides
from lightning_unified.cli.failure import report_failure
from lightning_unified.cli.plan.arguments import Asked, help_text, parse
from lightning_unified.errors import ConfigurationError
from lightning_unified.planner.garbage import no_collection

if TYPE_CHECKING:
    from lightning_unified.cli.plan.show import Page
    from lightning_unified.cli.plan.subject import Subject
    from lightning_unified.cli.plan.target_machine import Target
    from lightning_unified.cost_model.generation import Generated

__all__ = ["main"]

_OF_A_RUN = ("resume", "run_dir")
_OF_A_MODEL = ("model", "data", "platform")


def main(argv: Sequence[str], *, config_path: str = PACKAGED) -> int:
    """Print the plan; return 0, 1 if nothing fits or planning failed, 2 for an invalid request.

    Args:
        argv: Overrides and flags.
        config_path: The configuration: a folder or `pkg://package.name`.
    """
    try:
        asked = parse(argv)
        if asked.shell_completion is not None:
            from lightning_unified.cli.plan.completion import complete

            return complete(asked.shell_completion, config_path=config_path)
        if asked.calibration is not None:
            from lightning_unified.cli.plan.calibration_command import clear_calibration, show_calibration

            return (show_calibration if asked.calibration == "show" else clear_calibration)(as_json=asked.json)
        with no_collection(), searching(config_path):
            if asked.help:
                sys.stdout.write(help_text())
                return 0
            return _plan(asked)
    except (Exception, KeyboardInterrupt) as error:
        return report_failure(error)


def _plan(asked: Asked) -> int:
    """Plan the requested run and show the page; call it inside `searching`."""
    _check_keys(asked)
    config = check_overrides(asked.overrides, multirun=False).config
    # Import slowly loading modules only after the checks that need none of them.
    from lightning_unified.cli.plan.several_devices import group_arguments
    from lightning_unified.cli.plan.show import page_console, waiting
    from lightning_unified.cli.plan.subject import subject_of
    from lightning_unified.cli.plan.target_machine import configured_for, target_of
    from lightning_unified.cli.run.machine import check_settings
    from lightning_unified.cli.run.screen import quiet_third_parties

    check_settings(config)
    config, machine = configured_for(config, asked.overrides)
    with open_dict(config):
        config["run_dir"] = str(Path("runs", "plan"))
    asked_precision = str(config.memory.precision)
    target = target_of(config, machine)
    check_binding(config)
    group = group_arguments(config, backend=target.backend, link=asked.link)
    quiet_third_parties()
    with waiting("building the module without its weights"):
        subject = subject_of(asked, config, precision=target.precision.precision, ranks=group.get("devices", 1))
    with waiting("tracing the step"):
        page = _page(asked, config, subject=subject, target=target, precision=asked_precision, group=group)
    return page.show(asked, page_console())


def _page(
    asked: Asked,
    config: DictConfig,
    *,
    subject: "Subject",
    target: "Target",
    precision: str,
    group: Mapping[str, Any],
) -> "Page":
    """Plan for the target and the other machines, and return the page.

    Args:
        asked: The command line.
        config: The configuration.
        subject: The module, the Trainer and the batch.
        target: The machine.
        precision: The requested precision.
        group: The planner's arguments for several devices.
    """
    from lightning_unified.cli.plan.planner_calls import fits_where, with_phases
    from lightning_unified.cli.plan.show import Page
    from lightning_unified.cost_model import rates
    from lightning_unified.planner import predict
    from lightning_unified.planner.search.phases import Phases

    trainer = {"trainer": subject.trainer}
    planned = partial(
        predict.plan,
        subject.module,
        budget=target.budget.bytes,
        device=target.backend,
        rates=None if target.name is None else rates.tabled_rates(target.name),
        precision=target.precision.precision,
        phases=Phases(),
        **_options(config),
        **trainer,
        **group,
    )
    plan = planned(subject.batch, validation_batch=subject.validation_batch)
    others = {name: planned(batch, validation_batch=None) for name, batch in subject.other_batches.items()}
    plan = with_phases(plan, others)
    known = {
        "budget": target.budget.reason,
        "precision": target.precision.reason,
        "loader_workers": f"{target.workers.count}: {target.workers.reason}",
    }
    if config.memory.compile == "auto":
        known["compile"] = "auto decides when a run begins, by its length; planned as the module is"
    plan = replace(plan, reasons=known | dict(plan.reasons))
    where = ()
    if asked.fits_where:  # choices of a tier or of this hardware do not apply to other machines
        own = _options(config, only={key_of(override) for override in parse_overrides(asked.overrides)})
        where = fits_where(subject, precision=precision, options=own | trainer | dict(group))
    generation = None if asked.generate is None else _generation(asked, subject, precision=target.precision.precision)
    return Page(subject=subject, target=target, plan=plan, machines=where, generation=generation)


def _generation(asked: Asked, subject: "Subject", *, precision: str) -> "Generated":
    """Return the memory of a generation, by default with the batch's rows and length."""
    from lightning_unified.cli.plan.example_batches import length_of
    from lightning_unified.cost_model.generation import generated

    rows, prompt = asked.rows or subject.rows, asked.prompt or length_of(subject.batch)
    if rows is None or prompt is None:
        raise ConfigurationError("--generate: the batch has no rows of tokens; give --rows and --prompt.")
    try:
        return generated(subject.module, rows=rows, prompt=prompt, new=asked.generate or 0, precision=precision)
    except ValueError as error:
        raise ConfigurationError(f"--generate {asked.generate}: {error}") from error


def _options(config: DictConfig, *, only: Collection[str] | None = None) -> dict[str, Any]:
    """Return the planner's options from the configuration, or `only` those of some keys."""
    rows = config.memory.micro_batch_size
    settled = {
        "micro_batch_size": None if rows == "auto" else rows,
        "recompute": config.memory.recompute,
        "loss_chunk": config.memory.loss_chunk,
        "attention": config.memory.attention,
        "compile": False if config.memory.compile == "auto" else config.memory.compile,
    }
    found = {name: value for name, value in settled.items() if only is None or f"memory.{name}" in only}
    return {**found, "optimizer_rollback": config.memory.recover and config.memory.optimizer_rollback}


def _check_keys(asked: Asked) -> None:
    """Refuse overrides of things that a plan does not have."""
    for override in parse_overrides(asked.overrides):
        key = key_of(override)
        first = key.partition(".")[0].partition("/")[0]
        if first in _OF_A_RUN:
            raise ConfigurationError(f"{key}: a plan neither writes nor continues a run directory; leave it out.")
        if asked.module is not None and first in _OF_A_MODEL:
            raise ConfigurationError(
                f"{key}: with --module the model and its data are yours; size the batch with --batch or --batch-shape, the model with --kwargs."
            )
