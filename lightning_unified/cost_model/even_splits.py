"""List the even splits of a batch into micro-batches."""

__all__ = ["even_splits"]


def even_splits(rows: int, *, unit: int = 1, least: int = 1, most: int | None = None) -> list[tuple[int, ...]]:
    """Return every even split of a batch as the rows of its micro-batches, fewest micro-batches first.

    The step splits a batch into as few micro-batches as a limit on their rows allows, and as evenly as possible. Limits that
    give the same number of micro-batches give the same split. So there are at most about 2 * sqrt(rows / unit) splits.

    Args:
        rows: Number of rows of the whole batch.
        unit: Number of neighbouring rows that stay together. A batch whose rows are no multiple of `unit` runs whole.
        least: Least number of rows of a micro-batch.
        most: Largest micro-batch allowed, in rows. If every split exceeds it, the split with the smallest micro-batches is
            returned. None allows any.

    Raises:
        ValueError: If a number of rows is not positive.

    Example:
        >>> even_splits(10, most=4)
        [(4, 3, 3), (3, 3, 2, 2), (2, 2, 2, 2, 2), (1, 1, 1, 1, 1, 1, 1, 1, 1, 1)]
    """
    if min(rows, unit, least, 1 if most is None else most) < 1:
        raise ValueError(f"rows={rows}, unit={unit}, least={least}, most={most}: give positive numbers of rows.")
    units = rows // unit
    most_parts = 1 if rows % unit else max(rows // max(least, unit), 1)
    found: list[tuple[int, ...]] = [(rows,)]
    parts = 1
    while (largest := -(-units // parts)) > 1:
        parts = -(-units // (largest - 1))
        if parts > most_parts:
            break
        found.append(tuple(unit * (units // parts + (index < units % parts)) for index in range(parts)))
    return [split for split in found if most is None or split[0] <= most] or found[-1:]
