"""Gradients that lie in a buffer from step to step: when they are taken and freed."""

from lightning_unified.cost_model.memory.peak import peak
from lightning_unified.cost_model.memory.reserve import allocator_peak
from lightning_unified.cost_model.trace.gradient_buffer import with_gradient_buffer
from lightning_unified.cost_model.trace.trace import Give, Take, Trace, Work
from lightning_unified.hardware.allocators.settings import AllocatorSettings

MIB = 2**20
EVENTS = (
    Take(0, 40 * MIB, "weights"),
    Take(1, 40 * MIB, "gradients"),
    Work("mm", "forward"),
    Take(2, 60 * MIB, "activations"),
    Give(1),  # zero_grad
    Work("product", "forward"),
    Take(3, 10 * MIB, "gradients"),  # a loss in chunks makes it in the forward pass
    Work("mm", "backward"),
    Take(4, 30 * MIB, "gradients"),
    Give(2),
    Work("add", "backward"),
)


def test_gradients_are_added_to_the_buffer_of_the_step_before_and_freed():
    found = with_gradient_buffer(EVENTS)

    assert found[:2] == EVENTS[:2]
    assert Give(1) not in found
    made = [event for event in found if isinstance(event, Take) and event.storage in (3, 4)]
    assert {event.category for event in made} == {"temporaries"}
    order = [event for event in found if event in (Give(3), Give(4)) or isinstance(event, Work)]
    assert order[2:] == [Give(3), EVENTS[7], Give(4), EVENTS[10]]


def test_a_step_without_earlier_gradients_stays_as_it_is():
    events = tuple(event for event in EVENTS if event not in (Take(1, 40 * MIB, "gradients"), Give(1)))

    assert with_gradient_buffer(events) == events


def test_the_buffer_is_there_before_the_first_step():
    trace = Trace(events=with_gradient_buffer(EVENTS), rows=1, backend="cuda", replayed=("net",))
    found = allocator_peak(trace, settings=AllocatorSettings(expandable=True))

    assert found.allocated == peak(trace).bytes == (40 + 40 + 60 + 30) * MIB
    assert found.reserved == 180 * MIB, "pages of 20 MiB, without a hole"
