"""Caps and watermarks of allocators."""

import pytest

from lightning_unified.errors import BudgetError, ConfigurationError
from lightning_unified.hardware import Budget, cap_allocator, read, set_mps_environment, watermarks

GIB = 2**30
HIGH, LOW = "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"


def budget(count):
    return Budget(bytes=int(count * GIB), spec="test", reason="test", follows_others=False)


def pair(environ):
    return float(environ[HIGH]), float(environ[LOW])


@pytest.mark.parametrize("spec", ["auto", "4GiB", "60%", "leave 4GiB", "1GiB"])
@pytest.mark.parametrize("name", ["m1", "m2", "m4_pro"])
def test_the_written_pair_is_one_that_torch_accepts(machine, recorder, name, spec):
    cap = set_mps_environment(spec, sources=machine(name))
    high, low = pair(recorder.environ)

    assert cap.applied
    assert 0 < low <= high <= 1.0


@pytest.mark.parametrize("spec", ["auto", "4GiB", "60%", "leave 3GiB"])
@pytest.mark.parametrize("name", ["m1", "m2", "m4_pro"])
def test_low_lies_below_the_cap_that_follows(machine, recorder, name, spec):
    """LOW can never be changed later: above the cap it would never start to free anything."""
    from lightning_unified.hardware import resolve_budget

    sources = machine(name)
    set_mps_environment(spec, sources=sources)
    cap = cap_allocator("mps", resolve_budget(spec, read(sources=sources)), sources=sources)

    assert cap.applied
    assert pair(recorder.environ)[1] <= (cap.fraction or 0)
    assert "lies below LOW" not in cap.reason


def test_the_pair_stands_when_metals_allocator_is_constructed(machine, recorder):
    sources = machine("m4_pro")
    set_mps_environment("60%", sources=sources)
    read(sources=sources)

    assert recorder.metal_saw[HIGH] == "0.6000"
    assert recorder.metal_saw[LOW] == "0.5100"


def test_writing_the_pair_does_not_construct_the_allocator(machine, recorder):
    set_mps_environment("auto", sources=machine("m2"))

    assert recorder.metal_saw is None


def test_a_pair_written_before_is_replaced_while_the_allocator_does_not_exist(machine, recorder):
    sources = machine("m4_pro")
    set_mps_environment("60%", sources=sources)
    set_mps_environment("40%", sources=sources)

    assert pair(recorder.environ) == (0.4, 0.34)


def test_after_the_allocator_exists_nothing_is_written_and_the_record_says_so(machine, recorder):
    sources = machine("m4_pro")
    read(sources=sources)
    before = dict(recorder.environ)
    cap = set_mps_environment("40%", sources=sources)

    assert not cap.applied
    assert "too late" in cap.reason
    assert dict(recorder.environ) == before


def test_a_users_own_pair_is_respected_and_reported(machine, recorder):
    sources = machine("m2")
    recorder.environ.update({HIGH: "0.8", LOW: "0.6"})
    cap = set_mps_environment("4GiB", sources=sources)

    assert not cap.applied
    assert cap.reason == f"your own pair stays: {HIGH}=0.8, {LOW}=0.6"
    assert pair(recorder.environ) == (0.8, 0.6)


def test_half_a_pair_with_high_alone_is_completed(machine, recorder):
    """HIGH below 1.4 alone makes torch raise "invalid low watermark ratio 1.4"."""
    sources = machine("m2")
    recorder.environ[HIGH] = "0.8"
    cap = set_mps_environment("4GiB", sources=sources)

    assert cap.applied
    assert pair(recorder.environ) == (0.8, 0.68)


def test_half_a_pair_that_torch_accepts_is_left_alone(machine, recorder):
    sources = machine("m2")
    recorder.environ[HIGH] = "1.5"
    cap = set_mps_environment("4GiB", sources=sources)

    assert not cap.applied
    assert LOW not in recorder.environ


def test_half_a_pair_with_low_alone_keeps_low_and_gets_a_high_above_it(machine, recorder):
    sources = machine("m2")
    recorder.environ[LOW] = "0.7"
    set_mps_environment("2GiB", sources=sources)
    high, low = pair(recorder.environ)

    assert low == 0.7
    assert high >= low


@pytest.mark.parametrize(("high", "low"), [("0.5", "0.9"), ("2.5", "0.5"), ("-1", "0")])
def test_a_users_pair_that_torch_refuses_is_refused_here(machine, recorder, high, low):
    sources = machine("m2")
    recorder.environ.update({HIGH: high, LOW: low})
    with pytest.raises(ConfigurationError, match="a pair that torch refuses"):
        set_mps_environment("4GiB", sources=sources)


def test_a_users_ratio_that_is_no_number_is_refused(machine, recorder):
    sources = machine("m2")
    recorder.environ[HIGH] = "much"
    with pytest.raises(ConfigurationError, match="'much' is not a number; write a ratio from 0 to 2"):
        set_mps_environment("4GiB", sources=sources)


def test_a_budget_that_cannot_be_read_is_refused_before_anything_is_written(machine, recorder):
    sources = machine("m2")
    with pytest.raises(BudgetError, match="cannot be read"):
        set_mps_environment("lots", sources=sources)

    assert recorder.environ == {}


def test_without_mps_nothing_is_written(machine):
    sources = machine("rtx4090", environ={})
    cap = set_mps_environment("4GiB", sources=sources)

    assert not cap.applied
    assert sources.environ == {}


def test_a_raised_wired_limit_lowers_the_ratio_for_the_same_bytes(machine, recorder):
    """iogpu.wired_limit_mb moves Metal's working set, the ratios' denominator, one to one."""
    set_mps_environment("10GiB", sources=machine("m4_pro"))
    usual, _ = pair(recorder.environ)
    sources = machine("m4_pro")
    inner = sources.sysctl
    raised = machine("m4_pro", sysctl=lambda name: 46 * 1024 if name == "iogpu.wired_limit_mb" else inner(name))
    set_mps_environment("10GiB", sources=raised)

    assert pair(recorder.environ)[0] == pytest.approx(10 / 46, abs=1e-4)
    assert pair(recorder.environ)[0] < usual


def test_metals_cap_is_a_float_share_of_the_recommended_working_set(machine, recorder):
    sources = machine("m4_pro")
    set_mps_environment("9GiB", sources=sources)
    cap = cap_allocator("mps", budget(9), sources=sources)

    assert recorder.calls == [("fraction", 0.25, None)]
    assert (cap.applied, cap.fraction, cap.bytes) == (True, 0.25, 9 * GIB)


def test_metals_cap_below_low_is_applied_with_a_warning(machine, recorder):
    sources = machine("m4_pro")
    set_mps_environment("60%", sources=sources)
    cap = cap_allocator("mps", budget(9), sources=sources)

    assert cap.applied
    assert "lies below LOW (0.51)" in cap.reason


def test_metals_cap_respects_a_users_own_high(machine, recorder):
    sources = machine("m4_pro")
    recorder.environ.update({HIGH: "0.8", LOW: "0.6"})
    cap = cap_allocator("mps", budget(9), sources=sources)

    assert not cap.applied
    assert recorder.calls == []


def test_a_cuda_cap_is_a_share_of_total_memory(machine, recorder):
    cap = cap_allocator("cuda:0", budget(6), sources=machine("rtx4090"))

    assert recorder.calls == [("fraction", 0.25, 0)]
    assert cap.bytes == 6 * GIB


def test_a_cuda_device_without_index_caps_the_current_one(machine, recorder):
    cap_allocator("cuda", budget(12), sources=machine("rtx4090"))

    assert recorder.calls == [("fraction", 0.5, 0)]


def test_an_apus_cap_divides_by_total_memory_even_though_the_pool_is_larger(machine, recorder):
    sources = machine("strix_halo")
    cap = cap_allocator("cuda:0", budget(31.235), sources=sources)

    assert recorder.calls == [("fraction", pytest.approx(0.5, abs=1e-6), 0)]
    assert cap.applied


def test_an_apus_budget_above_total_memory_is_not_capped_and_the_record_says_so(machine, recorder):
    cap = cap_allocator("cuda:0", budget(100), sources=machine("strix_halo"))

    assert recorder.calls == []
    assert "above props.total_memory (62.47 GiB)" in cap.reason


def test_the_cpu_has_nothing_to_cap_and_says_so(machine):
    cap = cap_allocator("cpu", budget(4), sources=machine("cgroup_v1"))

    assert (cap.applied, cap.fraction) == (False, None)
    assert "cpu has no allocator to cap" in cap.reason


def test_a_torch_whose_xpu_cannot_be_capped_says_so(machine):
    cap = cap_allocator("xpu:0", budget(4), sources=machine("lunar_lake"))

    assert not cap.applied
    assert "no torch.xpu.set_per_process_memory_fraction" in cap.reason


def test_an_intel_gpu_is_capped_by_total_memory(machine, recorder):
    sources = machine("lunar_lake")
    sources.torch.xpu.set_per_process_memory_fraction = recorder.fraction(0, 1)
    cap_allocator("xpu:0", budget(7), sources=sources)

    assert recorder.calls == [("fraction", 0.25, 0)]


def test_the_marks_are_the_budget_and_85_percent_of_it(machine):
    marks = watermarks(budget(20), read(sources=machine("rtx4090")), {})

    assert (marks.high, marks.low) == (20 * GIB, 17 * GIB)


def test_the_marks_on_mps_follow_a_users_own_ratios(machine):
    marks = watermarks(budget(30), read(sources=machine("m4_pro")), {HIGH: "0.5", LOW: "0.25"})

    assert (marks.high, marks.low) == (18 * GIB, 9 * GIB)


def test_the_marks_on_mps_ignore_the_ratios_this_package_wrote(machine, recorder):
    sources = machine("m4_pro")
    set_mps_environment("auto", sources=sources)
    marks = watermarks(budget(20), read(sources=sources), recorder.environ)

    assert (marks.high, marks.low) == (20 * GIB, 17 * GIB)


def test_a_users_high_of_zero_means_no_limit_and_leaves_the_budget_as_the_mark(machine):
    assert watermarks(budget(20), read(sources=machine("m4_pro")), {HIGH: "0", LOW: "0.5"}).high == 20 * GIB


def test_a_torch_that_cannot_say_whether_the_allocator_exists_is_quoted_so(machine):
    sources = machine("m2")
    del sources.torch._C
    cap = set_mps_environment("4GiB", sources=sources)

    assert cap.applied
    assert "cannot say whether it is in time" in cap.reason
    assert "before Metal's allocator exists" in set_mps_environment("4GiB", sources=machine("m2")).reason


def test_a_fraction_that_the_user_set_stays_where_it_is_lower_and_is_reported(machine, recorder):
    sources, recorder.stands = machine("rtx4090"), 0.5
    cap = cap_allocator("cuda:0", budget(18), sources=sources)

    assert recorder.calls == []
    assert (cap.applied, cap.bytes) == (False, 12 * GIB)
    assert cap.reason == "your own memory fraction of 0.5 stays: 12.00 GiB, less than the budget"


def test_a_budget_below_the_users_fraction_is_the_cap(machine, recorder):
    sources, recorder.stands = machine("rtx4090"), 0.5

    assert cap_allocator("cuda:0", budget(6), sources=sources).applied
    assert recorder.stands == 0.25


def test_a_cap_of_an_earlier_budget_is_not_taken_for_the_users(machine, recorder):
    sources = machine("rtx4090")
    caps = [cap_allocator("cuda:0", budget(count), sources=sources) for count in (6, 18)]

    assert [cap.applied for cap in caps] == [True, True]
    assert recorder.stands == 0.75


@pytest.mark.parametrize(("name", "cap_gib"), [("m1", 4.0), ("m2", 11.84 * 0.95), ("m4_pro", 36 * 0.95)])
def test_the_safe_cap_of_a_mac_is_within_its_working_set_and_leaves_the_rest_of_ram(machine, recorder, name, cap_gib):
    """HIGH is the lower of 95 % of the working set and RAM less 15 %, at least 4 GiB.

    LOW is 85 % of it. Written before the working set is known.
    """
    sources = machine(name, sysctl=_idle(machine(name)))
    set_mps_environment("auto", sources=sources)
    high, low = pair(recorder.environ)
    total = read(sources=sources).total.bytes

    assert high * total <= cap_gib * GIB * 1.001
    assert low == pytest.approx(0.85 * high, abs=1e-3)


def _idle(mac):
    """A Mac on which nothing else runs."""
    pages = mac.sysctl("hw.memsize") // mac.sysctl("hw.pagesize")
    return lambda name: pages if name == "vm.page_free_count" else mac.sysctl(name)


def test_only_a_cap_that_lies_below_low_is_warned_about(machine, recorder):
    sources = machine("m4_pro")
    set_mps_environment("60%", sources=sources)

    assert cap_allocator("mps", budget(21), sources=sources).warning is None
    assert "LOW (0.51)" in cap_allocator("mps", budget(9), sources=sources).warning
