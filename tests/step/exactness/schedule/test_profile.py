"""A batch that differs in kind from the checked ones needs a check.

Ordinary batches need none, or checks would never end.
"""

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_unified.step.exactness.facts import figures
from lightning_unified.step.exactness.facts.figures import HostFigures
from lightning_unified.step.exactness.facts.profile import BatchProfiles, facts_of

SEEN = {
    "x": torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),
    "y": torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]),
    "tokens": torch.tensor([[5, 900, 70, 0], [400, 3, 0, 0]] * 4),
    "mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]] * 4),
    "labels": torch.tensor([[5, 6, 7, -100], [3, 4, -100, -100]] * 4),
    "flag": torch.tensor([True, False] * 4),
    "weight": torch.rand(8) + 0.5,
}


def with_row(name, row, value):
    changed = SEEN[name].clone()
    changed[row] = torch.as_tensor(value, dtype=changed.dtype)
    return {**SEEN, name: changed}


NEWS = {
    "a new label": with_row("y", 3, 3),
    "a label that is left out": with_row("y", 3, -100),
    "a row without observations": with_row("x", 3, [0.0] * 4),
    "a first zero": with_row("x", 3, [0.0, 1.0, 1.0, 1.0]),
    "a missing value": with_row("x", 3, [float("nan"), 1.0, 1.0, 1.0]),
    "an infinite value": with_row("x", 3, [float("inf"), 1.0, 1.0, 1.0]),
    "a row without padding": with_row("mask", 3, [1, 1, 1, 1]),
    "a row with a single entry": with_row("mask", 3, [1, 0, 0, 0]),
    "a row of padding": with_row("mask", 3, [0, 0, 0, 0]),
    "a row without scored labels": with_row("labels", 3, [-100] * 4),
    "a token of another order": with_row("tokens", 3, [70_000, 3, 0, 0]),
    "a weight of zero": with_row("weight", 3, 0.0),
    "an outlier": with_row("weight", 3, 9.0),
    "a negative weight": with_row("weight", 3, -0.5),
    "all flags set": {**SEEN, "flag": torch.ones(8, dtype=torch.bool)},
    "twice as long rows": {**SEEN, "x": torch.ones(8, 9)},
    "another tensor": {**SEEN, "z": torch.ones(8)},
    "a label in other rows only": {**SEEN, "y": torch.tensor([0, 1, 2, 5, 1, 2, 0, 1])},
}
ORDINARY = {
    "the same": SEEN,
    "other features": {**SEEN, "x": torch.randn(8, 4)},
    "other rows of the same labels": {**SEEN, "y": SEEN["y"].flip(0)},
    "fewer labels of those seen": {**SEEN, "y": torch.tensor([0, 1, 1, 1, 0, 1, 0, 1])},
    "other tokens of the same order": with_row("tokens", 3, [399, 4, 0, 0]),
    "other weights": {**SEEN, "weight": torch.rand(8) + 0.5},
    "fewer rows": {name: value[:4] for name, value in SEEN.items()},
    "a tensor without rows": {**SEEN, "scale": torch.ones(3)},
    "a list that is shared": {**SEEN, "names": ["a", "b"]},
}


def news_after(batch, *, checked=SEEN):
    profiles = BatchProfiles()
    profiles.add(facts_of(checked, 8))
    return profiles.news(facts_of(batch, len(batch["x"])))


ENTRIES = {
    "a list of tensors": lambda lengths: [torch.ones(length, 3) for length in lengths],
    "a packed sequence": lambda lengths: pack_sequence([torch.ones(n, 3) for n in lengths], enforce_sorted=False),
    "a nested tensor": lambda lengths: torch.nested.nested_tensor([torch.ones(n, 3) for n in lengths]),
    "a dict for each row": lambda lengths: [{"labels": torch.ones(length), "name": "a"} for length in lengths],
    "a tuple for each row": lambda lengths: [(torch.ones(2), torch.ones(length)) for length in lengths],
    "a list of numbers for each row": lambda lengths: [[1] * length for length in lengths],
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_row_with_an_entry_of_another_length_is_new(kind):
    profiles, entries = BatchProfiles(), ENTRIES[kind]
    profiles.add(facts_of({"rows": entries([4] * 8)}, 8))

    assert not profiles.news(facts_of({"rows": entries([4] * 8)}, 8))
    assert profiles.news(facts_of({"rows": entries([4] * 7 + [3])}, 8))


@pytest.mark.parametrize("name", NEWS)
def test_this_is_news(name):
    assert news_after(NEWS[name])


@pytest.mark.parametrize("name", ORDINARY)
def test_this_is_no_news(name):
    assert not news_after(ORDINARY[name])


@pytest.mark.parametrize("name", NEWS)
def test_news_once_checked_is_none(name):
    profiles = BatchProfiles()
    for batch in (SEEN, NEWS[name]):
        profiles.add(facts_of(batch, 8))

    assert not profiles.news(facts_of(NEWS[name], 8))


def test_news_that_was_not_checked_stays_news():
    profiles = BatchProfiles()

    assert profiles.news(facts_of(SEEN, 8)) == profiles.news(facts_of(SEEN, 8)) != frozenset()


@pytest.mark.slow
def test_random_batches_bring_news_ever_more_rarely():
    generator, profiles, checks = torch.Generator().manual_seed(0), BatchProfiles(), []
    for number in range(2000):
        length = int(torch.randint(3, 33, (), generator=generator))
        lengths = torch.randint(1, length + 1, (16,), generator=generator)
        mask = torch.arange(length) < lengths[:, None]
        batch = {
            "tokens": torch.randint(1, 30_000, (16, length), generator=generator) * mask,
            "mask": mask,
            "y": torch.randint(5, (16,), generator=generator),
        }
        if news := profiles.news(facts_of(batch, 16)):
            checks.append(number)
            profiles.add(news)

    assert len(checks) <= 40
    assert sum(number > 1000 for number in checks) <= 4


def test_batches_of_other_kinds_have_no_facts():
    assert facts_of({"fractions": [0.5, 1.5]}, 2) == frozenset()
    assert facts_of({"x": torch.ones(2, 3).to_sparse(), "z": torch.ones(2, dtype=torch.complex64)}, 2) == frozenset()


def test_a_field_of_sample_numbers_is_news_no_longer_after_64_values():
    profiles = BatchProfiles()
    batches = [{"id": torch.arange(start, start + 8)} for start in range(0, 200, 8)]
    news = []
    for batch in batches:
        facts = facts_of(batch, 8)
        news.append(any(kind == "value" for _, kind, _ in profiles.news(facts)))
        profiles.add(facts)

    assert news == [True] * 8 + [False] * 17


def test_an_attribute_that_changes_in_every_batch_is_news_eight_times():
    profiles, news = BatchProfiles(), []
    for number in range(12):
        facts = frozenset({(".name", "attribute", f"file {number}")})
        news.append(bool(profiles.news(facts)))
        profiles.add(facts)

    assert news == [True] * 8 + [False] * 4


def test_bends_at_one_place_of_the_loss_do_not_use_up_those_of_another():
    def bend(place, side):
        return "the loss", "bends", ("graph", place, "relu", side, False)

    profiles = BatchProfiles()
    profiles.add(frozenset(bend(place, 0) for place in range(40)))
    assert profiles.news(frozenset({bend(99, 0)}))

    profiles.add(frozenset(bend(99, side) for side in range(32)))
    assert not profiles.news(frozenset({bend(99, 33)}))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64]
)
def test_the_values_of_few_whole_numbers_are_facts(dtype):
    values = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]]).to(dtype)

    assert {fact for fact in facts_of({"y": values}, 4) if fact[1] == "value"} == {("y", "value", 0), ("y", "value", 1)}


def test_leaves_of_one_shape_have_the_facts_that_each_has_alone():
    together = facts_of(SEEN, 8)

    assert together == frozenset().union(*(facts_of({name: value}, 8) for name, value in SEEN.items()))


def test_the_values_of_a_large_leaf_are_those_of_a_small_one(monkeypatch):
    small = facts_of(SEEN, 8)
    monkeypatch.setattr("lightning_unified.step.exactness.facts.figures._LARGE", 4)

    assert facts_of(SEEN, 8) == small


@pytest.mark.parametrize("at_once", [1, 3, 10, 1 << 22])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 37), (2, 9, 5), (40, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8])
def test_counts_in_micro_batches_are_those_of_the_whole(monkeypatch, dtype, shape, at_once):
    values = torch.arange(2 * 9 * 5 * 5)[: torch.Size(shape).numel()].reshape(shape) % 4
    if dtype.is_floating_point and dtype.itemsize > 1:
        values = values.to(dtype).masked_fill(values == 3, torch.inf).masked_fill(values == 2, torch.nan)
    values = values.to(dtype)
    find = figures._float_figures if dtype.is_floating_point else figures._integer_figures
    expected = find(values)
    masks = []

    def noted(part):
        masks.append(part.numel())
        return (part.float() if dtype.itemsize == 1 else part) == 0

    monkeypatch.setattr(figures, "_AT_ONCE", at_once)

    assert torch.equal(find(values), expected)
    assert torch.equal(figures._counted(values, noted), (values.double() == 0).sum(2))
    assert max(masks) <= max(at_once, shape[0])


@pytest.mark.parametrize("at_once", [2, 3, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_size_and_sign_are_those_of_the_finite_entries_read_in_parts(monkeypatch, dtype, at_once):
    values = torch.tensor([[[0.5, torch.nan], [3.0, -9.0]], [[torch.inf, 2.0], [1.0, 0.0]]]).to(dtype)
    parts, wide = [], figures._wide
    monkeypatch.setattr(figures, "_AT_ONCE", at_once)
    monkeypatch.setattr(figures, "_wide", lambda part: (parts.append(part.numel()), wide(part))[1])
    low, high = figures._finite_limits(values.flatten(1))

    assert (low.tolist(), high.tolist()) == ([-9.0, 0.0], [3.0, 2.0])
    assert figures._float_figures(values)[:, -2:].tolist() == [[1, 1], [0, 0]]
    assert max(parts) <= max(at_once, 2)


def test_figures_of_float32_need_no_float64_which_mps_lacks():
    class Dtypes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            seen.update(one.dtype for one in tree_leaves(found) if isinstance(one, torch.Tensor))
            return found

    seen = set()
    with Dtypes():
        figures._float_figures(torch.randn(2, 3, 4))

    assert torch.float32 in seen
    assert torch.float64 not in seen


BY_ROW = {
    "texts": lambda labels: {"label": ["rare" if label else "common" for label in labels]},
    "whole numbers": lambda labels: {"label": labels},
    "tensors of one number": lambda labels: {"label": [torch.tensor(label) for label in labels]},
    "an array": lambda labels: {"label": np.array(labels)},
    "an array of texts": lambda labels: {"label": np.array(["rare" if label else "common" for label in labels])},
    "None": lambda labels: {"label": [label or None for label in labels]},
    "a list of dicts": lambda labels: [{"x": torch.ones(5), "label": label} for label in labels],
    "a list of tuples": lambda labels: [(torch.ones(5), torch.tensor(label)) for label in labels],
}


@pytest.mark.parametrize("name", BY_ROW)
def test_a_new_label_among_fields_that_are_no_tensors_is_news(name):
    profiles = BatchProfiles()
    profiles.add(facts_of(BY_ROW[name]([0, 0, 0, 0]), 4))

    assert not profiles.news(facts_of(BY_ROW[name]([0, 0, 0]), 3))
    assert profiles.news(facts_of(BY_ROW[name]([0, 0, 1, 0]), 4))


ARRAYS = {
    "in reverse": np.arange(8)[::-1],
    "in columns": np.asfortranarray(np.arange(16).reshape(8, 2)),
    "read only": np.broadcast_to(np.arange(2), (8, 2)),
    "of foreign byte order": np.arange(8, dtype=">i4"),
    "of long doubles": np.arange(8, dtype=np.longdouble),
    "of halves": np.ones((8, 2), np.float16),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_any_layout_have_the_facts_of_a_plain_copy(name):
    array = ARRAYS[name]
    plain = torch.tensor(array.astype(np.float64 if array.dtype.kind == "f" else np.int64))

    assert facts_of({"a": array}, 8) == facts_of({"a": plain}, 8)


def test_formats_of_eight_bits_have_facts():
    x = torch.tensor([[0.0, 1.0], [2.0, 4.0]] * 4)

    assert facts_of({"x": x.to(torch.float8_e4m3fn)}, 8) == facts_of({"x": x}, 8)


def moved(batch):
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


@pytest.mark.parametrize("name", [*NEWS, *ORDINARY])
def test_figures_from_before_a_move_give_the_same_facts_without_a_transfer(name, monkeypatch):
    host = {**NEWS, **ORDINARY}[name]
    device, known = moved(host), HostFigures()
    known.is_wanted = True
    known.note(host, device)
    rows = len(host["x"])
    expected = facts_of(device, rows)

    assert facts_of(device, rows, known) == expected
    if all(isinstance(value, torch.Tensor) for value in host.values()):
        monkeypatch.setattr(figures, "_on_host", lambda found: [] if not found else pytest.fail("it looked"))
        assert facts_of(device, rows, known) == expected


def test_a_tensor_that_was_written_after_the_move_is_looked_at_again():
    host = {"x": torch.randn(8, 3), "y": torch.arange(8) % 4}
    device, known = moved(host), HostFigures()
    known.is_wanted = True
    known.note(host, device)
    device["y"][3] = 60

    assert ("y", "value", 60) in facts_of(device, 8, known)


def test_figures_of_another_batch_are_forgotten():
    host = {"y": torch.arange(8) % 4}
    known, device = HostFigures(), moved(host)
    known.is_wanted = True
    known.note(host, device)
    known.note(host, moved(host))

    assert known.of(device["y"]) is None
