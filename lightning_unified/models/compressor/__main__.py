"""Command line of the compressor: evaluate a trained compressor, or compress a text.

Usage: `python -m lightning_unified.models.compressor evaluate|compress`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from lightning_unified.models.commands import add_device, command_parser, read_text, run_command, shows_colours
from lightning_unified.models.compressor.evaluation import held_out
from lightning_unified.models.compressor.evaluation.evaluate import KEEPS, EvaluationOptions, evaluate
from lightning_unified.models.compressor.evaluation.report import tables, write_record
from lightning_unified.models.compressor.evaluation.subject import require_trained
from lightning_unified.models.compressor.inference import checkpoint, render
from lightning_unified.models.compressor.inference.compress import compress

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 invalid argument."""
    return run_command(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser, commands = command_parser("compressor", description=__doc__)
    judge = commands.add_parser("evaluate", help="rate and distortion of the policy and of baselines on held-out texts")
    judge.add_argument(
        "--data",
        help="held-out texts: a .txt or .jsonl file, a folder, or a source (default: the validation side of training)",
    )
    judge.add_argument(
        "--corpus", help="training texts for frequencies and n-grams, likewise (default: the training data)"
    )
    judge.add_argument("--keep", type=float, nargs="+", default=list(KEEPS), help="budgets (default .3 .5 .7 .9)")
    judge.add_argument("--documents", type=int, help="number of held-out documents to use")
    judge.add_argument("--per-document", type=int, default=4, help="pieces of a document (default %(default)s)")
    judge.add_argument("--length", type=int, help="tokens of a piece (default: as in training)")
    judge.add_argument("--continuation", type=int, help="tokens predicted after it (default: a quarter of the piece)")
    judge.add_argument("--batch-size", type=int, default=32, help="pieces at a time (default %(default)s)")
    judge.add_argument("--no-rouge", action="store_true", help="write no texts: faster, without ROUGE-L")
    judge.add_argument("--output", help="folder for evaluation.json and evaluation.png")
    judge.add_argument("--json", action="store_true", help="print the record instead of tables")
    judge.set_defaults(run=_evaluate)
    squeeze = commands.add_parser("compress", help="print a text with the share of its tokens that the policy keeps")
    squeeze.add_argument("file", nargs="?", default="-", help="a text file; - or nothing reads standard input")
    squeeze.add_argument("--keep", type=float, default=0.5, help="share of tokens that stays (default %(default)s)")
    squeeze.add_argument(
        "--show", action="store_true", help="print the whole text, dropped tokens in colour, or as [-dropped-]"
    )
    squeeze.add_argument("--json", action="store_true", help="print text, ids and kept positions as JSON")
    squeeze.add_argument("--html", help="write the text with kept and dropped tokens marked to this file")
    squeeze.set_defaults(run=_compress)
    for command in (judge, squeeze):
        command.add_argument("--checkpoint", required=True, help="the .ckpt file that training has saved")
        add_device(command)
        command.add_argument("--seed", type=int, default=0, help="of random scores, ties and resampling (default 0)")
    return parser


def _evaluate(options: argparse.Namespace) -> None:
    module = checkpoint.load(options.checkpoint, device=options.device)
    data = checkpoint.read(options.checkpoint).get("datamodule_hyper_parameters", {})
    corpus, texts = [], []
    if options.data is None or options.corpus is None:
        corpus, texts = held_out.sides(data)
    texts = held_out.read(options.data) if options.data else texts
    corpus = held_out.read(options.corpus) if options.corpus else corpus
    chosen = EvaluationOptions(
        keeps=options.keep,
        length=options.length,
        continuation=options.continuation,
        per_document=options.per_document,
        batch_size=options.batch_size,
        reconstruct=not options.no_rouge,
        seed=options.seed,
    )
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("evaluating")
        record = evaluate(
            module,
            texts[: options.documents],
            corpus=corpus,
            options=chosen,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    record = {"checkpoint": options.checkpoint, "data": options.data or data, **record}
    if options.output:
        write_record(record, Path(options.output), name="evaluation")
    if options.json:
        print(json.dumps(record, indent=1))
        return
    console = Console()
    console.print(f"{record['documents']} held-out documents, {record['pieces']} pieces, {record['tokens']:,} tokens")
    for table in tables(record):
        console.print(table)


def _compress(options: argparse.Namespace) -> None:
    text = sys.stdin.read() if options.file == "-" else read_text(Path(options.file))
    module = checkpoint.load(options.checkpoint, device=options.device)
    encoder = require_trained(module)
    found = compress(text, keep=options.keep, module=module, seed=options.seed)
    if options.html:
        page = render.page(encoder, found.original_ids, kept=found.flags)
        Path(options.html).write_text(page, encoding="utf-8")
    if options.json:
        kept = {"text": found.text, "ids": found.ids, "kept": found.kept}
        print(json.dumps({**kept, "tokens": len(found.original_ids), "keep": found.keep}, ensure_ascii=False))
    elif options.show:
        console = Console(highlight=False)
        shown = render.terminal(encoder, found.original_ids, kept=found.flags, colours=shows_colours(console))
        console.print(shown, soft_wrap=True)
    else:
        print(found.text)


if __name__ == "__main__":
    sys.exit(main())
