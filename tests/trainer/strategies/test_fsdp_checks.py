"""Ranks that hold shards check together that their batches split exactly."""

from functools import cache

import pytest
import torch

from tests.support.lanes import slow
from tests.support.ranks import sharded_checks
from tests.support.ranks.processes import on_ranks


@cache
def several():
    return on_ranks(
        sharded_checks.several,
        ("scored", 1),
        ("scored", 8),
        ("contrastive", 1),
        ("sealed", 1),
        ("contrastive validation", 2),
        ("clamping", 1),
        ("auxiliary", 1),
    )


@cache
def more():
    return on_ranks(
        sharded_checks.several,
        ("contrastive", 8),
        ("wrapped", 1),
        ("wrapped", 8),
        ("contrastive at times", 1),
        ("logs at times", 1),
        ("draws on first", 1),
        ("draws on first", 8),
    )


def test_a_batch_split_after_a_check_trains_as_a_whole_one():
    for fits in several():
        split, whole = fits["scored", 1], fits["scored", 8]
        assert (split["checks"] > 0, whole["checks"]) == (True, 0)
        torch.testing.assert_close(split["weights"], whole["weights"], rtol=0, atol=1e-10)
        assert split["seen"] == whole["seen"]
        assert split["metrics"] == pytest.approx(whole["metrics"], abs=1e-10)
        assert split["rows seen"] == whole["rows seen"] == sharded_checks.ROWS_OF["scored"] / 2


def test_all_ranks_refuse_a_module_that_compares_rows():
    for fits in several():
        assert "Contrastive cannot be split exactly" in fits["contrastive", 1]["refused"]


def test_all_ranks_refuse_a_backward_pass_that_is_not_proportional_to_the_loss():
    for fits in several():
        assert "a backward pass that is not proportional to its loss" in fits["auxiliary", 1]["refused"]


@pytest.mark.slow
def test_a_module_that_compares_rows_trains_on_whole_batches():
    for fits in more():
        assert "refused" not in fits["contrastive", 8]


@pytest.mark.slow
def test_all_ranks_check_the_batch_with_which_one_of_them_meets_a_new_term():
    for fits in more():
        assert "ContrastiveAtTimes cannot be split exactly" in fits["contrastive at times", 1]["refused"]


@pytest.mark.slow
def test_a_log_of_one_rank_alone_is_checked_by_all():
    first, second = (fits["logs at times", 1] for fits in more())

    assert first["seen"][2] == 0
    assert second["seen"][2] > 0
    assert first["checks"] == second["checks"]


def test_a_batch_that_cannot_be_sent_is_refused_by_name():
    for fits in several():
        assert 'hold="shards" cannot send a batch to the other ranks' in fits["sealed", 1]["refused"]


def test_all_ranks_refuse_a_validation_that_fails_on_few_rows():
    for fits in several():
        assert "too few rows to compare" in fits["contrastive validation", 2]["refused"]


@pytest.mark.slow
def test_windows_by_terms_train_as_with_whole_parameters():
    for sizes in on_ranks(sharded_checks.windows_by_terms, "auto", 1):
        reference = sizes[0][0]
        assert reference.isfinite().all()
        for weights in (one for size in sizes for one in size):
            torch.testing.assert_close(weights, reference, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_all_ranks_check_fewer_rows_if_one_lacks_memory_for_more():
    first, second = on_ranks(sharded_checks.short_of_memory)

    assert first["checks"] == second["checks"] > 0
    assert torch.equal(first["weights"], second["weights"])


@pytest.mark.slow
def test_a_validation_that_calls_layers_alone_is_checked_too():
    for fits in more():
        split, whole = fits["wrapped", 1], fits["wrapped", 8]
        torch.testing.assert_close(split["weights"], whole["weights"], rtol=0, atol=1e-10)
        assert split["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], abs=1e-10)


def test_all_ranks_refuse_weights_that_are_written_in_the_step():
    for fits in several():
        assert "in its step, after its forward pass has used it" in fits["clamping", 1]["refused"]


@pytest.mark.slow
def test_a_draw_on_one_rank_alone_ends_no_run():
    for fits in more():
        split, whole = fits["draws on first", 1], fits["draws on first", 8]
        torch.testing.assert_close(split["weights"], whole["weights"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("recover", [True, slow(False)])
def test_a_step_that_fails_on_one_rank_alone_ends_all_and_says_why(recover):
    first, second = on_ranks(sharded_checks.failing, recover)

    assert "RankError" in first["refused"]
    assert "the step of rank 1 failed" in second["refused"]
    assert "no such column" in second["refused"]
