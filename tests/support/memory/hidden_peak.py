"""The peak of the memory that a kernel takes inside."""

from lightning_unified.cost_model.backends.kernel_memory.calls import BACK, RESULT


def temporary_bytes(hidden):
    """Return the peak of live bytes beside the results of a call."""
    held, most = [], 0
    for step in hidden.order:
        if step == BACK:
            held.pop()
        elif step != RESULT:
            held.append(step)
        most = max(most, sum(held))
    return most
