"""Sphinx directives for the parts of the manual that are generated from the code."""

import re
from pathlib import Path
from typing import Any, ClassVar

import commands
import configuration
from docutils import nodes
from ipython_pygments_lexers import IPython3Lexer
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

__all__ = ["setup"]

_PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")


class _Generated(SphinxDirective):
    """Markdown that a function returns."""

    has_content: ClassVar[bool] = False

    def markdown(self) -> str:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        text = _PAGE.sub(r"[](/\1.md)", self.markdown())
        return self.parse_text_to_nodes(text, allow_section_headings=True)


class Commands(_Generated):
    """Every command with its arguments."""

    def markdown(self) -> str:
        return commands.described()


class Configuration(_Generated):
    """The choices and keys of one group of conf/; without an argument, of the files beside the groups."""

    optional_arguments: ClassVar[int] = 1

    def markdown(self) -> str:
        group = self.arguments[0] if self.arguments else ""
        for path in Path(configuration.CONF, group).rglob("*.yaml"):
            self.env.note_dependency(str(path))
        return configuration.described(group)


class Notebooks(_Generated):
    """The notebooks of the page's folder, as a table of contents."""

    def markdown(self) -> str:
        self.env.note_reread()  # a notebook may be added
        names = sorted(path.stem for path in Path(self.env.doc2path(self.env.docname)).parent.glob("*.ipynb"))
        return "\n".join(["```{toctree}", ":maxdepth: 1", "", *names, "```"]) if names else ""


class Records(_Generated):
    """The records of the page's folder, one section each."""

    def markdown(self) -> str:
        page = Path(self.env.doc2path(self.env.docname))
        records = sorted(path for path in page.parent.glob("*.md") if path != page)
        for path in records:
            self.env.note_dependency(str(path))
        return "\n".join(f"#{path.read_text(encoding='utf-8')}" for path in records)


def with_plain_returns(_app: Sphinx, what: str, _name: str, _of: object, _options: object, lines: list[str]) -> None:
    """Mark descriptions of returned values as text.

    Napoleon takes the words before a colon for a type; here, annotations give the types.
    """
    if what in {"attribute", "property"} and ":" in lines[0]:
        lines[0] = f": {lines[0]}"
    for number, line in enumerate(lines[:-1]):
        if line.strip() in {"Returns:", "Yields:"}:
            text = lines[number + 1]
            lines[number + 1] = f"{text[: len(text) - len(text.lstrip())]}: {text.lstrip()}"


def with_links(_app: Sphinx, _what: str, _name: str, _of: object, _options: object, lines: list[str]) -> None:
    """Turn paths of pages, as docstrings write them, into links."""
    lines[:] = [_PAGE.sub(r":doc:`/\1`", line) for line in lines]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_lexer("python", IPython3Lexer)  # Python, and the %%bash cells of notebooks
    app.add_directive("commands", Commands)
    app.connect("autodoc-process-docstring", with_plain_returns, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", with_links, priority=400)
    app.add_directive("configuration", Configuration)
    app.add_directive("notebooks", Notebooks)
    app.add_directive("records", Records)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
