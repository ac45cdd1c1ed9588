"""Show plans and predictions: on a terminal, as Markdown, as a picture."""

from lightning_unified.cost_model.render.markdown import to_markdown
from lightning_unified.cost_model.render.page import sheet_of
from lightning_unified.cost_model.render.picture import to_png
from lightning_unified.cost_model.render.planned import MachinePlan, does_fit, least_bytes
from lightning_unified.cost_model.render.terminal import to_terminal, to_text

__all__ = ["MachinePlan", "does_fit", "least_bytes", "sheet_of", "to_markdown", "to_png", "to_terminal", "to_text"]
