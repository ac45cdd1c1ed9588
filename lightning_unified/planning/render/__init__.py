"""Plans and predictions for people: on a terminal, as Markdown, as a picture."""

from lightning_unified.planning.render.markdown import to_markdown
from lightning_unified.planning.render.picture import to_png
from lightning_unified.planning.render.planned import Alternative, MachinePlan, Planned, does_fit
from lightning_unified.planning.render.terminal import to_terminal

__all__ = ["Alternative", "MachinePlan", "Planned", "does_fit", "to_markdown", "to_png", "to_terminal"]
