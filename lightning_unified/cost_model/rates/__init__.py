"""Speeds of a machine: from tables, or measured briefly or in a second or two."""

from lightning_unified.cost_model.rates.measured import brief_rates, measure_alignment, measure_rates
from lightning_unified.cost_model.rates.record import Alignment, Rates
from lightning_unified.cost_model.rates.tabled import tabled_rates, typical_rates

__all__ = ["Alignment", "Rates", "brief_rates", "measure_alignment", "measure_rates", "tabled_rates", "typical_rates"]
