"""Code blocks of the manual and of the root's pages, with their pages' remarks on running.

A block's language says what CI does with it:

- `python`: the blocks of a page run in order, in one namespace.
- `bash`: each command is checked against its parser, the configuration, the Makefile or the extras.
- `text`: an output or a format, not code.
- `json`, `yaml`: parsed.

An HTML comment before a block, which a reader does not see, changes that:

- `<!-- not run: reason -->`: Python that is only compiled, or a command that is not checked.
- `<!-- setup … -->`: Python that runs before the block, such as a module that stands for the reader's own.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

__all__ = ["PAGES", "ROOT", "Block", "blocks", "blocks_of"]

RUN_ELSEWHERE = {ROOT / "docs/reference/micro_batches.md"}  # tests/repository/docs/test_docs_splitting.py
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - {*ROOT.glob("docs/_build/**/*.md")})
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<mark>```+|~~~+)(?P<language>[^\n]*)\n(?P<code>.*?)^(?P=indent)(?P=mark) *$",
    re.MULTILINE | re.DOTALL,
)
_COMMENT = re.compile(r"<!-- (not run:|setup)\s((?:(?!-->).)*)-->\s*\Z", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: place, language, code, reason not to run it, and code to run before it."""

    page: Path
    line: int
    language: str
    code: str
    not_run: str = ""
    setup: str = ""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(text: str, page: Path = ROOT / "README.md") -> Iterator[Block]:
    """Yield the fenced blocks of a page, except directives of the site (`{toctree}`)."""
    for found in _FENCE.finditer(text):
        language = found["language"].strip()
        if language.startswith("{"):
            continue
        said = _COMMENT.search(text[: found.start()])
        kind, words = (said[1], said[2]) if said else ("", "")
        yield Block(
            page=page,
            line=text.count("\n", 0, found.start()) + 1,
            language=language,
            code=re.sub(rf"^{found['indent']}", "", found["code"], flags=re.MULTILINE),
            not_run=" ".join(words.split()) if kind == "not run:" else "",
            setup=words if kind == "setup" else "",
        )


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of these languages in all pages."""
    found = [block for page in PAGES for block in blocks_of(page.read_text(encoding="utf-8"), page)]
    return [block for block in found if block.language in languages and block.page not in RUN_ELSEWHERE]
