"""Command line of a fine-tuned model: chat, evaluate, merge, export, or look at data.

Usage: `python -m lightning_unified.models.finetune chat|evaluate|merge|export|data`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_unified.models.causal_lm.sampling import Sampling
from lightning_unified.models.commands import add_device, command_parser, run_command

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 invalid argument."""
    return run_command(_parser(), arguments, dialogue=True)


def _parser() -> argparse.ArgumentParser:
    parser, commands = command_parser("finetune", description=__doc__)
    chat = commands.add_parser("chat", help="talk with the model in the terminal")
    chat.add_argument("--system", help="the system message")
    chat.add_argument("--max-new-tokens", type=int, default=256, help="length of an answer (default %(default)s)")
    chat.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default %(default)s)")
    chat.add_argument("--top-k", type=int, default=50, help="0 is all tokens (default %(default)s)")
    chat.add_argument("--top-p", type=float, default=0.9, help="1 is all tokens (default %(default)s)")
    chat.add_argument("--seed", type=int, default=None, help="makes the answers repeatable")
    chat.set_defaults(run=_chat)
    judge = commands.add_parser("evaluate", help="loss and perplexity on held-out examples, beside the base model")
    judge.add_argument("--data", help="examples to evaluate (default: the validation side of the training data)")
    judge.add_argument("--samples", type=int, default=3, help="answers to show (default %(default)s)")
    judge.add_argument("--max-new-tokens", type=int, default=96, help="length of an answer (default %(default)s)")
    judge.add_argument("--batch-size", type=int, default=4, help="rows at a time (default %(default)s)")
    judge.add_argument("--json", action="store_true", help="print one JSON record")
    judge.set_defaults(run=_evaluate)
    merge = commands.add_parser("merge", help="write the whole model as safetensors, for transformers and mlx-lm")
    merge.add_argument("--dtype", help="float32 or bfloat16 (default: as in training)")
    merge.set_defaults(run=_merge)
    export = commands.add_parser("export", help="write the adapters alone, for peft")
    export.set_defaults(run=_export)
    look = commands.add_parser("data", help="count examples and tokens, and show which are scored")
    look.add_argument("path", nargs="?", help="file or folder (default: questions about Python's functions)")
    look.add_argument("--pretrained", help="the model with tokenizer and template (default: smollm2-135m)")
    look.add_argument("--template", help="a file with a chat template in place of the model's own")
    look.add_argument("--sequence-length", type=int, default=1024, help="tokens of a row (default %(default)s)")
    look.add_argument("--loss-on", default="answers", help="answers, last or all (default %(default)s)")
    look.set_defaults(run=_data)
    for command in (merge, export):
        command.add_argument("folder", help="where to write: a new or empty folder")
    for command in (chat, judge, merge, export):
        command.add_argument("--checkpoint", required=True, help="the .ckpt file that training has saved")
    for command in (chat, judge):
        add_device(command)
    return parser


def _load(options: argparse.Namespace, *, device: str | None = None) -> Any:
    checkpoint: Any = import_module("lightning_unified.models.causal_lm.checkpoint")  # needs torch and Lightning
    finetune: Any = import_module("lightning_unified.models.finetune.module")
    untrained = "it would answer as before"
    path = options.checkpoint
    return checkpoint.load_trained(
        finetune.Finetune, path, model="finetune", untrained=untrained, device=device or options.device
    )


def _chat(options: argparse.Namespace) -> None:
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    talk: Any = import_module("lightning_unified.models.finetune.use.talk")
    talk.talk(_load(options), sampling=sampling, system=options.system, seed=options.seed)


def _evaluate(options: argparse.Namespace) -> None:
    for name in ("batch_size", "max_new_tokens"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: give 1 or more.")
    if options.samples < 0:
        raise ValueError(f"--samples {options.samples}: give 0 or more.")
    evaluation: Any = import_module("lightning_unified.models.finetune.use.evaluation")
    module = _load(options)
    sizes = {"batch_size": options.batch_size, "samples": options.samples, "max_new_tokens": options.max_new_tokens}
    found = evaluation.evaluate(module, evaluation.held_out(module, options.data), **sizes)
    if options.json:
        print(json.dumps(found.record(), ensure_ascii=False))
        return
    print(f"{found.examples:,} examples, {found.tokens:,} scored tokens")
    for name, loss in found.losses.items():
        print(f"{name:<8} loss {loss:.4f}  perplexity {found.perplexities[name]:,.2f}")
    if found.without_base:
        print(f"no base model beside it: {found.without_base}")
    for sample in found.samples:
        shown = {"prompt": sample.prompt, "expected": sample.expected, **sample.answers}
        print("\n" + "\n".join(f"{name:<8} {' '.join(text.split())}" for name, text in shown.items()))


def _merge(options: argparse.Namespace) -> None:
    export: Any = import_module("lightning_unified.models.finetune.use.export")
    files = export.write_merged(_load(options, device="cpu"), Path(options.folder), dtype=options.dtype)
    print(f"{options.folder}: {', '.join(files)}")


def _export(options: argparse.Namespace) -> None:
    export: Any = import_module("lightning_unified.models.finetune.use.export")
    files = export.write_adapters(_load(options, device="cpu"), Path(options.folder))
    print(f"{options.folder}: {', '.join(files)}")


def _data(options: argparse.Namespace) -> None:
    look: Any = import_module("lightning_unified.models.finetune.use.look")
    shown = look.look(
        path=options.path,
        pretrained=options.pretrained or "smollm2-135m",
        template=options.template,
        sequence_length=options.sequence_length,
        loss_on=options.loss_on,
    )
    print(shown)


if __name__ == "__main__":
    sys.exit(main())
