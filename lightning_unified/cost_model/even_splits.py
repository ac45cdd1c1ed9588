"""The ways in which a batch can be cut into even micro-batches."""

__all__ = ["even_splits"]


def even_splits(rows: int, *, unit: int = 1, least: int = 1, most: int | None = None) -> list[tuple[int, ...]]:
    """Return the rows of each micro-batch for every way to cut a batch that has another largest part, the fewest parts first.

    The step cuts a batch into as few parts as a limit allows, as even as can be; so limits that give equally many parts are one
    way. There are at most about 2 * sqrt(rows / unit) of them.

    Args:
        rows: Of the whole batch.
        unit: Rows that stay together. A batch that is no multiple of it runs whole.
        least: Rows that every micro-batch needs.
        most: The largest micro-batch allowed; the smallest there is is returned if all are larger. None allows any.

    Raises:
        ValueError: If a number of rows is not positive.
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
    return [cut for cut in found if most is None or cut[0] <= most] or found[-1:]
