"""Findings about environment variables."""

import pytest

from lightning_unified.hardware import lint_environment

HIGH, LOW = "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"


def lint(environ, *, initialized: bool | None = False, **known):
    return lint_environment(environ, allocator_initialized=initialized, **known)


def only(environ, **known):
    findings = lint(environ, **known)
    assert len(findings) == 1, findings
    return findings[0]


def test_an_environment_without_torch_variables_gives_nothing():
    assert lint({"PATH": "/bin", "PYTORCH_DEBUG_MPS_ALLOCATOR": "1"}) == []


def test_a_misspelt_variable_is_answered_with_the_nearest_real_one():
    finding = only({"PYTORCH_MPS_HIGH_WATERMARK_RATE": "0.7"})

    assert finding.verdict == "warning"
    assert f"did you mean {HIGH}?" in finding.advice


def test_the_allocator_policy_that_never_existed_is_named_as_such():
    finding = only({"PYTORCH_MPS_ALLOCATOR_POLICY": "native"})

    assert finding.verdict == "warning"
    assert "no torch has ever read it" in finding.advice


@pytest.mark.parametrize(
    "name", ["PYTORCH_MPS_FAST_MATH", "PYTORCH_MPS_PREFER_METAL", "PYTORCH_MPS_DISABLE_PREFILL_ATTENTION"]
)
def test_real_variables_pass(name):
    assert lint({name: "1"}) == []


@pytest.mark.parametrize(
    ("environ", "verdict", "says"),
    [
        ({HIGH: "0.9", LOW: "0.75"}, "ok", "a valid pair"),
        ({HIGH: "0.9"}, "error", "invalid low watermark ratio 1.4"),
        ({HIGH: "1.0"}, "error", f"set {LOW}=0.85 as well"),
        ({HIGH: "1.5"}, "warning", "can exceed the machine's memory"),
        ({LOW: "0.7"}, "warning", "1.7 can exceed"),
        ({HIGH: "0.0"}, "warning", "0 means no limit"),
        ({HIGH: "0.8", LOW: "0.9"}, "error", "LOW 0.9 is above HIGH 0.8"),
        ({HIGH: "2.5", LOW: "0.9"}, "error", "out of range"),
        ({HIGH: "-0.5", LOW: "0"}, "error", "out of range"),
        ({HIGH: "much", LOW: "0.9"}, "error", "is not a number"),
        ({HIGH: "0.9", LOW: "little"}, "error", "is not a number"),
        ({HIGH: "0.9", LOW: "0"}, "note", "turns off early freeing"),
    ],
)
def test_the_pair_is_judged_as_torch_will(environ, verdict, says):
    finding = only(environ)

    assert (finding.verdict, finding.value) == (verdict, environ[finding.variable])
    assert says in finding.advice


def test_a_pair_set_after_the_allocator_exists_is_said_to_be_late():
    verdicts = [(f.verdict, "exists already" in f.advice) for f in lint({HIGH: "0.9", LOW: "0.7"}, initialized=True)]

    assert verdicts == [("ok", False), ("note", True)]


def test_an_allocator_nobody_can_ask_about_gives_no_verdict_on_lateness():
    assert [f.verdict for f in lint({HIGH: "0.9", LOW: "0.7"}, initialized=None)] == ["ok"]


@pytest.mark.parametrize(("value", "count"), [("1", 1), ("0", 0), ("", 0)])
def test_the_mps_fallback_is_noted_when_on(value, count):
    findings = lint({"PYTORCH_ENABLE_MPS_FALLBACK": value})

    assert [f.verdict for f in findings] == ["note"] * count


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("expandable_segments:True", "ok"),
        ("expandable_segments:true", "error"),
        ("expandable_segments:1", "error"),
        ("per_process_memory_fraction:0.85,throw_on_cudamalloc_oom:True", "ok"),
        ("per_process_memory_fraction:0.85,throw_on_cudamalloc_oom:yes", "error"),
        ("per_process_memory_fraction:85", "error"),
        ("per_process_memory_fraction:most", "error"),
        ("max_split_size_mb:128", "ok"),
    ],
)
@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_allocator_switches_must_be_the_words_that_torch_reads(variable, text, verdict):
    assert only({variable: text}).verdict == verdict


def test_a_switch_in_small_letters_is_answered_with_its_right_form():
    assert "write expandable_segments:True" in only({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:true"}).advice


@pytest.mark.parametrize(
    ("value", "cores", "threads", "verdict", "says"),
    [
        ("4", 8, 4, "ok", "within the cores"),
        ("4", None, None, "ok", "within the cores"),
        ("4,2", 8, 4, "ok", "within the cores"),
        ("16", 8, 16, "warning", "more threads than the 8 cores"),
        ("4", 8, 8, "warning", "torch uses 8 threads: set after import"),
        ("0", 8, 8, "warning", "not a count of threads"),
        ("many", 8, 8, "warning", "not a count of threads"),
    ],
)
def test_the_thread_count_is_held_against_cores_and_torch(value, cores, threads, verdict, says):
    finding = only({"OMP_NUM_THREADS": value}, cores=cores, num_threads=threads)

    assert finding.verdict == verdict
    assert says in finding.advice
