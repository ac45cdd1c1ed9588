"""Show a compressed text in a terminal or as an HTML file; colours mark kept tokens."""

import html
from collections.abc import Iterator, Sequence

from rich.text import Text

from lightning_unified.models.compressor.evaluation.subject import Encoder

__all__ = ["page", "segments", "terminal"]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4  # bytes of UTF-8, and so tokens of a byte-level vocabulary
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 16px/1.6 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff; }}
h1 {{ font-size: 1.1rem; }}
p {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
mark {{ background: #cfe8d5; color: inherit; }}
del {{ color: #a33; opacity: .55; }}
@media (prefers-color-scheme: dark) {{ body {{ color: #ddd; background: #1a1a1a; }} mark {{ background: #20502f; }} del {{ color: #e88; }} }}
</style></head><body>
<h1>{title}</h1>
<p>{body}</p>
</body></html>
"""


def segments(encoder: Encoder, ids: Sequence[int], *, kept: Sequence[bool]) -> list[tuple[str, bool]]:
    """Return the text of `ids` in runs of tokens that were all kept or all dropped.

    A character that several tokens share is never torn: it counts as kept if any of them was.
    """
    runs: list[tuple[str, bool]] = []
    for text, flag in _characters(encoder, ids, kept):
        if runs and runs[-1][1] == flag:
            runs[-1] = (runs[-1][0] + text, flag)
        else:
            runs.append((text, flag))
    return runs


def terminal(encoder: Encoder, ids: Sequence[int], *, kept: Sequence[bool], colours: bool = True) -> Text:
    """Return the text for `rich.print`.

    Kept tokens are bold and green, dropped ones dim, red and struck through. Without colours, dropped tokens stand between `[-` and `-]`.
    """
    shown = Text()
    if not colours:
        return shown.append(
            "".join(text if flag else f"[-{text}-]" for text, flag in segments(encoder, ids, kept=kept))
        )
    for text, flag in segments(encoder, ids, kept=kept):
        shown.append(text, style="bold green" if flag else "dim red strike")
    return shown


def page(encoder: Encoder, ids: Sequence[int], *, kept: Sequence[bool]) -> str:
    """Return one self-contained HTML page: kept tokens marked, dropped tokens struck through."""
    tags = {True: "mark", False: "del"}
    body = "".join(
        f"<{tags[flag]}>{html.escape(text)}</{tags[flag]}>" for text, flag in segments(encoder, ids, kept=kept)
    )
    return _PAGE.format(title=f"{sum(kept)} of {len(ids)} tokens kept", body=body)


def _characters(encoder: Encoder, ids: Sequence[int], kept: Sequence[bool]) -> Iterator[tuple[str, bool]]:
    """Yield the shortest runs of tokens that decode to whole characters."""
    waiting: list[int] = []
    flag = False
    for token, is_kept in zip(ids, kept, strict=True):
        waiting.append(token)
        flag = flag or bool(is_kept)
        text = encoder.decode(waiting)
        if text.endswith(_BROKEN) and len(waiting) < _LONGEST_CHARACTER:
            continue
        yield text, flag
        waiting, flag = [], False
    if waiting:
        yield encoder.decode(waiting), flag
