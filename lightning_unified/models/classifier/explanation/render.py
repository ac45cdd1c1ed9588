"""Render an explanation for a terminal or as HTML.

Words for the label are green, words against it red; without colours they bear signed numbers.
"""

import html
from collections.abc import Iterator, Sequence

from rich.text import Text

from lightning_unified.models.classifier.explanation.explain import Explanation

__all__ = ["page", "segments", "summary", "terminal"]

_LEAST_SHOWN = 0.1
_FOR, _AGAINST = (0, 140, 70), (200, 40, 40)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 16px/1.7 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff; }}
h1 {{ font-size: 1.1rem; }} h2 {{ font-size: 1rem; margin-top: 2rem; }}
p {{ white-space: pre-wrap; overflow-wrap: anywhere; }} small {{ opacity: .75; }}
span {{ border-radius: .2rem; }}
@media (prefers-color-scheme: dark) {{ body {{ color: #ddd; background: #1a1a1a; }} }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def segments(explanation: Explanation) -> Iterator[tuple[str, float]]:
    """Yield the pieces of the text with strengths from -1 to 1; text between words has 0."""
    most = max((abs(word.attribution) for word in explanation.words), default=0.0) or 1.0
    done = 0
    for word in explanation.words:
        if word.start > done:
            yield explanation.text[done : word.start], 0.0
        start = max(word.start, done)
        if word.end > start:
            yield explanation.text[start : word.end], word.attribution / most
            done = word.end
    if done < len(explanation.text):
        yield explanation.text[done:], 0.0


def summary(explanation: Explanation) -> str:
    """Return label, probability, convergence and deletion in one line."""
    verdict = "" if explanation.converged else "; NOT converged, do not trust these strengths"
    share = abs(explanation.delta) / max(abs(explanation.difference), 1e-12)
    parts = [
        f"{explanation.label} {explanation.probability:.4f} (all words masked: {explanation.baseline_probability:.4f})",
        f"attributions miss the difference of {explanation.difference:.3f} by {share:.1%} at {explanation.steps} steps{verdict}",
    ]
    if (found := explanation.deletion) is not None:
        parts.append(
            f"deletion area {found.area:.3f}, {found.orders} random orders {found.random_mean:.3f} ± {found.random_deviation:.3f} "
            f"(p = {found.p_value:.3f})"
        )
    return "; ".join(parts)


def terminal(explanation: Explanation, *, colours: bool = True) -> Text:
    """Return the text for `rich.print`; a stronger word has a stronger colour.

    Without colours, words of at least a tenth of the strongest word's strength are followed by it, as in `bad[-0.80]`.
    """
    shown = Text()
    for text, strength in segments(explanation):
        if not strength:
            shown.append(text)
            continue
        if not colours:
            shown.append(f"{text}[{strength:+.2f}]" if abs(strength) >= _LEAST_SHOWN else text)
            continue
        red, green, blue = (round(255 + (part - 255) * abs(strength)) for part in _colour(strength))
        shown.append(text, style=f"{'white' if abs(strength) > 0.6 else 'black'} on rgb({red},{green},{blue})")
    return shown


def page(explanations: Sequence[Explanation], *, title: str = "Which words speak for the label") -> str:
    """Return one self-contained HTML page."""
    parts = []
    for one in explanations:
        parts.append(f"<h2>{html.escape(one.label)}</h2>\n<small>{html.escape(summary(one))}</small>")
        parts.append(f"<p>{''.join(_marked(text, strength) for text, strength in segments(one))}</p>")
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def _marked(text: str, strength: float) -> str:
    if not strength:
        return html.escape(text)
    red, green, blue = _colour(strength)
    alpha = f"{0.75 * abs(strength):.2f}"
    return f'<span style="background:rgba({red},{green},{blue},{alpha})" title="{strength:+.2f}">{html.escape(text)}</span>'


def _colour(strength: float) -> tuple[int, int, int]:
    return _FOR if strength > 0 else _AGAINST
