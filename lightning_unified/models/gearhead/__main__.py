"""`python -m lightning_unified.models.gearhead infer`: diagnoses from the command line."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_unified.models.causal_lm.sampling import Sampling
from lightning_unified.models.commands import add_device, command_parser, run_command
from lightning_unified.models.gearhead.diagnoser import Diagnoser

__all__ = ["main"]

_QUIT = {"quit", "exit"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 invalid argument."""
    return run_command(_parser(), arguments, dialogue=True)


def _parser() -> argparse.ArgumentParser:
    parser, commands = command_parser("gearhead", description=__doc__)
    infer = commands.add_parser("infer", help="ask a trained model; without a question, it prompts for questions")
    infer.add_argument("--checkpoint", required=True, help="the .ckpt file that training has saved")
    infer.add_argument("--equipment", help="the machine, as in 'Caterpillar 320 Excavator'")
    infer.add_argument("--symptom", help="the symptom, as in 'loses power under load'")
    infer.add_argument("--error-codes", nargs="+", default=[], metavar="CODE", help="as in P0087 'SPN 157'")
    infer.add_argument("--batch-file", help="a JSON list of objects with equipment, symptom and error_codes")
    infer.add_argument("--prompt", help="free text to continue, for models trained on text")
    infer.add_argument("--output", help="write the answers to this file as JSON")
    infer.add_argument("--max-new-tokens", type=int, default=128, help="length of an answer (default %(default)s)")
    infer.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default %(default)s)")
    infer.add_argument("--top-k", type=int, default=50, help="0 is all tokens (default %(default)s)")
    infer.add_argument("--top-p", type=float, default=0.9, help="1 is all tokens (default %(default)s)")
    infer.add_argument("--seed", type=int, default=None, help="makes the answer repeatable")
    add_device(infer)
    infer.set_defaults(run=_infer)
    return parser


def _infer(options: argparse.Namespace) -> None:
    _check(options)
    diagnoser = Diagnoser.from_checkpoint(options.checkpoint, device=options.device)
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    if options.prompt is None and options.equipment is None and options.batch_file is None:
        _interact(diagnoser, sampling=sampling, options=options)
    else:
        _answer(diagnoser, sampling=sampling, options=options)


def _check(options: argparse.Namespace) -> None:
    asked = [name for name in ("equipment", "batch_file", "prompt") if getattr(options, name) is not None]
    if len(asked) > 1:
        raise ValueError(
            f"--{' and --'.join(name.replace('_', '-') for name in asked)} were given; ask one thing at a time."
        )
    if (options.equipment is None) != (options.symptom is None):
        raise ValueError("--equipment and --symptom belong together; give both, or neither to be asked for them.")
    if options.error_codes and options.equipment is None:
        raise ValueError("--error-codes needs --equipment and --symptom beside it.")


def _answer(diagnoser: Diagnoser, *, sampling: Sampling, options: argparse.Namespace) -> None:
    if options.prompt is not None:
        text = diagnoser.generate([options.prompt], sampling=sampling, seed=options.seed)[0]
        print(options.prompt + text)
        results: Any = {"prompt": options.prompt, "full_response": text}
    elif options.batch_file is not None:
        results = diagnoser.batch_diagnose(_records(Path(options.batch_file)), sampling=sampling, seed=options.seed)
        print("\n\n".join(report(result) for result in results))
    else:
        results = diagnoser.diagnose(
            options.equipment, options.symptom, options.error_codes, sampling=sampling, seed=options.seed
        )
        print(report(results))
    if options.output is not None:
        Path(options.output).write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no batch file {path}; give a JSON list of objects with equipment and symptom."
        )
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not JSON ({error}); it must be a list of objects with equipment and symptom."
        ) from error
    if not isinstance(records, list) or not records:
        raise ValueError(f"{path} must hold a JSON list with at least one object of equipment and symptom.")
    return records


def _interact(diagnoser: Diagnoser, *, sampling: Sampling, options: argparse.Namespace) -> None:
    print("Type quit or exit to leave.")
    while True:
        first = input("Prompt: " if diagnoser.network.config.is_text_model else "Equipment: ").strip()
        if first.lower() in _QUIT:
            return
        if not first:
            continue
        try:
            if diagnoser.network.config.is_text_model:
                print(first + diagnoser.generate([first], sampling=sampling, seed=options.seed)[0])
                continue
            symptom = input("Symptom: ").strip()
            if symptom.lower() in _QUIT:
                return
            given = input("Error codes, separated by commas (Enter to skip): ").split(",")
            error_codes = [code.strip() for code in given if code.strip()]
            print(report(diagnoser.diagnose(first, symptom, error_codes, sampling=sampling, seed=options.seed)))
        except ValueError as error:
            print(error, file=sys.stderr)


def report(result: dict[str, Any]) -> str:
    """Return a diagnosis as a printable report."""
    subsystem = "not predicted by this model"
    if result["subsystem"] is not None:
        subsystem = f"{result['subsystem']} (probability {result['subsystem_probability']:.2f})"
    rule = "=" * 60
    return "\n".join(
        (
            rule,
            "DIAGNOSTIC REPORT",
            rule,
            f"Equipment:            {result['equipment']}",
            f"Symptom:              {result['symptom']}",
            f"Error codes:          {', '.join(result['error_codes']) or 'none'}",
            f"Predicted subsystem:  {subsystem}",
            f"Probable cause:       {result['probable_cause'] or 'none given'}",
            f"Recommended solution: {result['solution'] or 'none given'}",
            rule,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
