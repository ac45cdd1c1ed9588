"""Name alike summands of rows that lack some of them.

Two means of one kind over different rows of one layer have the same name but for their number in the graph. A step leaves a mean out where no
row has a term of it, and the next of its kind then has its number. The terms of each tell which it is.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice, product

from lightning_unified.step.exactness.losses.summands.fitting import RunOfSummands, are_proportional
from lightning_unified.step.exactness.losses.summands.tree import REST

__all__ = ["keys_by_terms", "named_by_terms", "possible_terms"]

_MOST = 8  # judgement: more ways to name the summands of a check are seldom possible
_FEW = 3  # judgement: alike summands without divisors that are told apart; the ways grow as a power of their number


def keys_by_terms(own: Sequence[str], has_terms: Mapping[str, bool], zeros: Collection[str] = ()) -> list[str] | None:
    """Return the keys of some rows' summands; None if one is unknown, or one with terms is missing.

    What has no gradient keeps its key, known or not. So does an unknown summand that is multiplied by 0.

    Args:
        own: Their keys, numbered among these rows' summands, in the order of the graph.
        has_terms: Whether the rows have terms of each known summand.
        zeros: Those of their keys whose summands are multiplied by the number 0.
    """
    extra = {key for key in own if key in zeros and key not in has_terms}
    if extra:
        named = keys_by_terms([key for key in own if key not in extra], has_terms)
        others = iter(named or ())
        return None if named is None else [key if key in extra else next(others) for key in own]
    if not any(has for key, has in has_terms.items() if key not in own and key != REST):
        return [*own] if {*has_terms, REST} >= {*own} else None
    kinds = [_kind(key) for key in own]
    left = {kind: [key for key in has_terms if _kind(key) == kind] for kind in map(_kind, (*has_terms, *own))}
    for kind, keys in left.items():
        if len(keys) > kinds.count(kind):
            left[kind] = [key for key in keys if has_terms[key]]
        if len(left[kind]) != kinds.count(kind) and kind != REST:
            return None
    return [REST if kind == REST else left[kind].pop(0) for kind in kinds]


def named_by_terms(run: RunOfSummands, has_terms: Mapping[str, bool]) -> RunOfSummands:
    """Return a run with its summands' keys by `keys_by_terms`; the run as it is where it has others."""
    own = [*run.values]
    keys = keys_by_terms(own, has_terms)
    if keys is None or [*keys] == own:
        return run
    names = dict(zip(own, keys, strict=True))
    # the gradients of summands that the rows lack are zeros, whatever their names
    others = [key for key in run.gradients if key not in names.values()]
    names |= dict(zip([key for key in run.gradients if key not in names], others, strict=False))
    return RunOfSummands(
        gradients={names[key]: gradient for key, gradient in run.gradients.items() if key in names},
        values={names[key]: value for key, value in run.values.items()},
        divisors={names[key]: divisor for key, divisor in run.divisors.items()},
        zeros={names[key] for key in run.zeros if key in names},
    )


def possible_terms(
    runs: Sequence[RunOfSummands], keys: Collection[str], counted: Callable[[str], Sequence[Sequence[float]]]
) -> Iterator[dict[str, Sequence[bool]]]:
    """Yield in which micro-batches alike summands may have terms.

    All ways are yielded that explain how many each micro-batch lacks. Nothing is yielded where all runs have all of them.

    Args:
        runs: The runs of the micro-batches.
        keys: The summands of all rows.
        counted: Returns a summand's number of terms in each micro-batch, by each loss rule that may hold. It is called for summands of
            which some micro-batch lacks one of their kind.
    """
    of_kind = dict[str, list[str]]()
    for key in keys:
        of_kind.setdefault(_kind(key), []).append(key)
    ways: list[list[dict[str, Sequence[bool]]]] = []
    for kind, own in of_kind.items():
        divisors = [[run.divisors.get(key) for key in run.values if _kind(key) == kind] for run in runs]
        if any(len(one) < len(own) for one in divisors):
            numbers = [counted(key) for key in own]
            ways.append([dict(zip(own, way, strict=True)) for way in islice(_ways(divisors, numbers), _MOST)])
    for chosen in islice(product(*ways) if ways else (), _MOST):
        yield {key: has for way in chosen for key, has in way.items()}


def _ways(
    divisors: Sequence[Sequence[float | None]], numbers: Sequence[Sequence[Sequence[float]]]
) -> Iterator[tuple[Sequence[bool], ...]]:
    """Yield in which micro-batches each of some alike summands has terms.

    Args:
        divisors: The divisors of the summands that each micro-batch has.
        numbers: For each summand, the number of terms of each micro-batch, by each loss rule that may hold.
    """
    is_told = any(one is not None for own in divisors for one in own)
    if not is_told and len(numbers) > _FEW:
        return
    # without divisors, only whether there are terms can tell
    kept = [
        list(dict.fromkeys(tuple(one if is_told else float(one > 0) for one in counts) for counts in own))
        for own in numbers
    ]
    found = set[tuple[tuple[bool, ...], ...]]()
    for way in _assigned(divisors, kept):
        has_terms = tuple(tuple(count > 0 for count in counts) for counts in way)
        if has_terms not in found:
            found.add(has_terms)
            yield has_terms


def _assigned(
    divisors: Sequence[Sequence[float | None]], numbers: Sequence[Sequence[tuple[float, ...]]]
) -> Iterator[tuple[tuple[float, ...], ...]]:
    """Yield the numbers of terms of some summands, of which micro-batches have those with terms, in order."""
    if not numbers:
        yield from () if any(map(len, divisors)) else ((),)
        return
    for counts in numbers[0]:
        left = [own[1:] if count else own for own, count in zip(divisors, counts, strict=True)]
        taken = [(own, count) for own, count in zip(divisors, counts, strict=True) if count]
        if max(map(len, left)) >= len(numbers) or not all(own for own, _ in taken):
            continue
        known = [(own[0], count) for own, count in taken if own[0] is not None]
        if not known or are_proportional(known):
            yield from ((counts, *others) for others in _assigned(left, numbers[1:]))


def _kind(key: str) -> str:
    return key.partition(" (")[0]
