"""Decisions of a step by values of its rows, as facts."""

from lightning_unified.step.exactness.facts.decisions.batch import BatchDecisions, Decisions

__all__ = ["BatchDecisions", "Decisions"]
