"""Bootstrap intervals and paired comparisons over documents, and a record's rows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lightning_unified.models.compressor.evaluation.measures import MEASURES

__all__ = [
    "CONFIDENCE",
    "Comparison",
    "Estimate",
    "Values",
    "compare",
    "estimate",
    "exponential",
    "policy_against",
    "rows",
]

Values = Mapping[tuple[str, float, str], np.ndarray]
"""One value a document, by method, budget and measure; NaN where there is none."""

_COMPARED = ("dropped_cross_entropy", "continuation_cross_entropy", "rouge_l")
_HIGHER_IS_BETTER = {"rouge_l"}

CONFIDENCE = 0.95
_BLOCK = 250  # resamples in a chunk, since 2,000 over thousands of documents take much memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over documents and its 95 % interval; a single document has no interval (None)."""

    mean: float
    low: float | None
    high: float | None
    documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Mean difference over common documents, with its 95 % interval and p-value.

    Attributes:
        difference: Mean of first minus second, with its interval.
        p_value: Two-sided p-value of a sign-flipping permutation test.
    """

    difference: Estimate
    p_value: float


def estimate(values: np.ndarray, *, resamples: int = 2000, seed: int = 0) -> Estimate:
    """Return the mean of one value a document, with its percentile bootstrap interval.

    The bootstrap resamples documents. Pieces or tokens of one document are similar, so resampling them would make the intervals
    too narrow. The same seed draws the same documents for every method.

    Args:
        values: (D,); NaN where a document has no value.
        resamples: Draws of D documents with replacement.
        seed: Of the draws.

    Raises:
        ValueError: If no document has a value.

    Source:
        Efron and Tibshirani 1993, "An Introduction to the Bootstrap", section 13.3.
    """
    values = _known(values)
    if len(values) == 1:
        return Estimate(mean=float(values[0]), low=None, high=None, documents=1)
    generator = np.random.default_rng(seed)
    means = np.concatenate(
        [
            values[generator.integers(len(values), size=(min(_BLOCK, resamples - done), len(values)))].mean(1)
            for done in range(0, resamples, _BLOCK)
        ]
    )
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(mean=float(values.mean()), low=float(low), high=float(high), documents=len(values))


def compare(first: np.ndarray, second: np.ndarray, *, resamples: int = 2000, seed: int = 0) -> Comparison:
    """Return how two methods differ in the same quantity on the same documents.

    Args:
        first: (D,), one value a document; NaN where there is none.
        second: (D,), of the same documents in the same order.
        resamples: Of the bootstrap; the permutation test draws as many.
        seed: Of the draws.

    Raises:
        ValueError: If the two are not of one length, or have no document in common.

    Source:
        Under the null hypothesis a difference's sign is a coin's: Fisher 1935, "The Design of Experiments", section 21. One is
        added to both counts, so that a finite number of draws never claims 0 (Phipson and Smyth 2010).
    """
    if first.shape != second.shape:
        raise ValueError(
            f"{first.shape} and {second.shape} values cannot be paired; give one a document, in one order."
        )
    differences = _known(first - second)
    generator = np.random.default_rng([seed, 1])
    observed = abs(differences.mean())
    as_large = 0
    for done in range(0, resamples, _BLOCK):
        signs = generator.integers(2, size=(min(_BLOCK, resamples - done), len(differences))) * 2 - 1
        as_large += int((np.abs((signs * differences).mean(1)) >= observed - 1e-12 * max(observed, 1)).sum())
    return Comparison(
        difference=estimate(differences, resamples=resamples, seed=seed), p_value=(1 + as_large) / (1 + resamples)
    )


def rows(
    values: Values, *, methods: Sequence[str], keeps: Sequence[float], resamples: int, seed: int
) -> list[dict[str, Any]]:
    """Return each method's estimates at each budget as plain data."""
    found = []
    for method in methods:
        for keep in keeps:
            row: dict[str, Any] = {"method": method, "keep": keep}
            for name in MEASURES:
                if (method, keep, name) in values:
                    row[name] = asdict(estimate(values[method, keep, name], resamples=resamples, seed=seed))
            nats: dict[str, Any] = row["continuation_cross_entropy"]
            row["continuation_perplexity"] = {end: exponential(nats[end]) for end in ("mean", "low", "high")}
            found.append(row)
    return found


def policy_against(
    values: Values, rows: Sequence[Mapping[str, Any]], *, resamples: int, seed: int
) -> list[dict[str, Any]]:
    """Compare the policy with each baseline in `rows`, as plain data.

    `intervals` names the better method if the intervals are disjoint.
    """
    policies = {row["keep"]: row for row in rows if row["method"] == "policy"}
    found = []
    for row in rows:
        method, keep = row["method"], row["keep"]
        for name in _COMPARED:
            if method == "policy" or name not in row:
                continue
            result = compare(values["policy", keep, name], values[method, keep, name], resamples=resamples, seed=seed)
            verdict = _verdict(policies[keep][name], row[name], measure=name)
            found.append({"baseline": method, "keep": keep, "measure": name, **asdict(result), "intervals": verdict})
    return found


def exponential(nats: float | None) -> float | None:
    """Return the perplexity of a cross-entropy, at most exp(700): exp(710) overflows a float."""
    return None if nats is None else math.exp(min(nats, 700.0))


def _verdict(policy: Mapping[str, Any], baseline: Mapping[str, Any], *, measure: str) -> str:
    if None in (policy["low"], policy["high"], baseline["low"], baseline["high"]):
        return "unknown"
    if policy["low"] <= baseline["high"] and baseline["low"] <= policy["high"]:
        return "overlap"
    return "policy" if (policy["mean"] > baseline["mean"]) == (measure in _HIGHER_IS_BETTER) else "baseline"


def _known(values: np.ndarray) -> np.ndarray:
    known = np.asarray(values, dtype=np.float64)
    known = known[~np.isnan(known)]
    if not len(known):
        raise ValueError("no document has a value; there is nothing to estimate.")
    return known
