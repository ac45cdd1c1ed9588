"""Command line of a trained classifier: predict, evaluate, export or explain.

Usage: `python -m lightning_unified.models.classifier predict|evaluate|export|explain`.
"""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from lightning_unified.models.classifier.data.reading.format import Column, FileFormat, Settings
from lightning_unified.models.classifier.inference import checkpoint
from lightning_unified.models.classifier.inference.classify import Classification, classify
from lightning_unified.models.classifier.inference.evaluate import Evaluation, evaluate
from lightning_unified.models.classifier.inference.text_files import Given, read_texts
from lightning_unified.models.classifier.module import TextClassifier
from lightning_unified.models.commands import add_device, command_parser, run_command, shows_colours

__all__ = ["main"]

_FLAGS = Settings(path="", text="--field ", label="--label-field ", encoding="--encoding ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 invalid argument."""
    return run_command(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser, commands = command_parser("classifier", description=__doc__)
    predict = commands.add_parser("predict", help="labels and probabilities of texts")
    predict.add_argument("--json", action="store_true", help="print one JSON record a text")
    predict.add_argument(
        "--csv", action="store_true", help="print a table: source, label, one column of probabilities a label"
    )
    predict.set_defaults(run=_predict)
    judge = commands.add_parser("evaluate", help="figures on a labelled test set")
    judge.add_argument("--json", action="store_true", help="print one JSON record")
    judge.add_argument("--label-field", type=_column, help="column or key of the class (default: as in training)")
    judge.add_argument("--save", metavar="FOLDER", help="write evaluation.json and evaluation.png into this folder")
    judge.add_argument("files", nargs="+", help=".csv, .tsv or .jsonl, or a folder with a subfolder for each class")
    judge.set_defaults(run=_evaluate)
    write = commands.add_parser("export", help="a folder for transformers, and a torch.export program")
    write.add_argument("folder", help="where to write")
    write.add_argument("--no-program", action="store_true", help="write no torch.export program")
    write.set_defaults(run=_export)
    explain = commands.add_parser("explain", help="which words speak for a label, and which against it")
    explain.add_argument("--label", help="explain this label (default: the likeliest)")
    explain.add_argument(
        "--orders", type=int, default=100, help="random orders of deletion to compare with (default 100)"
    )
    explain.add_argument("--steps", type=int, default=32, help="steps of the integral to begin with (default 32)")
    explain.add_argument("--seed", type=int, default=0, help="of the random orders (default 0)")
    explain.add_argument("--html", help="write the coloured texts to this file")
    explain.add_argument("--json", action="store_true", help="print one JSON record a text")
    explain.set_defaults(run=_explain)
    for command in (predict, judge):
        command.add_argument("--batch-size", type=int, default=64, help="texts at a time (default %(default)s)")
    for command in (predict, explain):
        command.add_argument(
            "files", nargs="*", default=["-"], help="text, .csv, .tsv or .jsonl; - reads standard input"
        )
        command.add_argument("--lines", action="store_true", help="each line of a text file is a text")
    for command in (predict, judge, explain):
        command.add_argument(
            "--field", type=_column, help="column, its number from 0, or key of the text (default: as in training)"
        )
        command.add_argument("--encoding", help="of the files (default: as in training)")
    for command in (predict, judge, write, explain):
        command.add_argument("--checkpoint", required=True, help="the .ckpt file that training has saved")
        add_device(command)
    return parser


def _column(text: str) -> Column:
    return int(text) if text.isdecimal() else text


def _file_format(options: argparse.Namespace, module: TextClassifier, *, labelled: bool) -> FileFormat:
    """Return the format that the flags ask for, by default that of the training."""
    trained = module.identity.file_format
    label = None
    if labelled:
        label = trained.label if options.label_field is None else options.label_field
    return FileFormat(
        text=trained.text if options.field is None else options.field,
        label=label,
        encoding=options.encoding or trained.encoding,
        settings=_FLAGS,
    )


def _texts(options: argparse.Namespace, module: TextClassifier) -> list[Given]:
    """Return the texts to read, without blank ones, which are counted on standard error."""
    form = _file_format(options, module, labelled=False)
    texts = read_texts(options.files, form=form, lines=options.lines)
    worded = [given for given in texts if given[1].strip()]
    if len(worded) < len(texts):
        first = next(source for source, text in texts if not text.strip())
        print(
            f"{len(texts) - len(worded)} of {len(texts)} texts are blank and get no label: {first} …", file=sys.stderr
        )
    return worded


def _predict(options: argparse.Namespace) -> None:
    if options.json and options.csv:
        raise ValueError("--json and --csv are two forms of the same; give one.")
    module = checkpoint.load(options.checkpoint, device=options.device)
    texts = _texts(options, module)
    found = classify([text for _, text in texts], module=module, batch_size=options.batch_size)
    if options.json:
        for (source, _), one in zip(texts, found, strict=True):
            print(json.dumps({"source": source, **asdict(one)}, ensure_ascii=False))
    elif options.csv:
        _print_table(texts, found, module.label_names)
    else:
        for (source, _), one in zip(texts, found, strict=True):
            best = ", ".join(f"{name} {share:.4f}" for name, share in list(one.probabilities.items())[:5])
            print(f"{source}\t{one.label}\t{best}{' (cut off)' if one.cut_off else ''}")


def _print_table(texts: Sequence[Given], found: Sequence[Classification], names: Sequence[str]) -> None:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["source", "label", *names])
    for (source, _), one in zip(texts, found, strict=True):
        table.writerow([source, one.label, *(f"{one.probabilities[name]:.6f}" for name in names)])


def _evaluate(options: argparse.Namespace) -> None:
    module = checkpoint.load(options.checkpoint, device=options.device)
    form = _file_format(options, module, labelled=True)
    found = evaluate(module, options.files, form=form, batch_size=options.batch_size)
    record = {**found.report.record(), **{name: getattr(found, name) for name in Evaluation.COUNTS}}
    if options.save:
        from lightning_unified.models.classifier.evaluation.picture import draw

        folder = Path(options.save)
        draw(found.report, folder / "evaluation.png")
        (folder / "evaluation.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, ensure_ascii=False) if options.json else found.text())


def _export(options: argparse.Namespace) -> None:
    from lightning_unified.models.classifier.inference.exporting import export

    module = checkpoint.load(options.checkpoint, device="cpu")
    written = export(module, options.folder, program=not options.no_program)
    print(f"{written.folder}: {', '.join(written.files)}")
    if written.program is not None:
        print(f"{written.program}: probabilities within {written.largest_difference:.1e} of the model's")


def _explain(options: argparse.Namespace) -> None:
    from lightning_unified.models.classifier.explanation import render
    from lightning_unified.models.classifier.explanation.explain import explain

    module = checkpoint.load(options.checkpoint, device=options.device)
    texts = _texts(options, module)
    found = [
        explain(module, text, label=options.label, orders=options.orders, steps=options.steps, seed=options.seed)
        for _, text in texts
    ]
    if options.html:
        Path(options.html).write_text(render.page(found), encoding="utf-8")
    if options.json:
        for (source, _), one in zip(texts, found, strict=True):
            print(json.dumps({"source": source, **asdict(one)}, ensure_ascii=False))
        return
    console = Console()
    for (source, _), one in zip(texts, found, strict=True):
        console.print(f"{source}: {render.summary(one)}", highlight=False, soft_wrap=True)
        console.print(render.terminal(one, colours=shows_colours(console)), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
