"""Check the environment variables of torch's memory use before a run fails on one."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_unified.errors import ConfigurationError
from lightning_unified.hardware.environment.mps import DEFAULT_HIGH, DEFAULT_LOW, HIGH, LOW, ratio_of

__all__ = ["MPS_VARIABLES", "Finding", "lint_environment"]

MPS_VARIABLES = (
    HIGH,
    LOW,
    "PYTORCH_MPS_FAST_MATH",
    "PYTORCH_MPS_PREFER_METAL",
    "PYTORCH_MPS_LOG_PROFILE_INFO",
    "PYTORCH_MPS_TRACE_SIGNPOSTS",
    "PYTORCH_MPS_DISABLE_PREFILL_ATTENTION",
)
"""All `PYTORCH_MPS_*` that torch 2.13 reads; the last is new in 2.13."""

_FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_ALLOCATOR_SWITCHES = (
    "expandable_segments",
    "graph_capture_record_stream_reuse",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "throw_on_cudamalloc_oom",
)

Verdict = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A finding about one variable.

    Attributes:
        variable: Its name.
        value: Its value, empty if it is not set.
        verdict: `"ok"`, `"note"` (worth knowing), `"warning"` (has another effect than its name says), `"error"` (torch will raise).
        advice: The remedy.
    """

    variable: str
    value: str
    verdict: Verdict
    advice: str


def lint_environment(
    environ: Mapping[str, str],
    *,
    allocator_initialized: bool | None,
    cores: int | None = None,
    num_threads: int | None = None,
) -> list[Finding]:
    """Return findings about the variables that torch reads; only the arguments are read.

    Args:
        environ: The environment.
        allocator_initialized: Whether the accelerator's allocator exists already and has read its variables.
        cores: Cores this process may use, None if unknown.
        num_threads: Result of `torch.get_num_threads()`, None without torch.
    """
    return [
        *_unknown_names(environ),
        *_pair(environ, allocator_initialized=allocator_initialized),
        *_fallback(environ),
        *_allocator_settings(environ),
        *_threads(environ, cores=cores, num_threads=num_threads),
    ]


def _unknown_names(environ: Mapping[str, str]) -> list[Finding]:
    findings = []
    for name in sorted(environ):
        if not name.startswith("PYTORCH_MPS_") or name in MPS_VARIABLES:
            continue
        near = difflib.get_close_matches(name, MPS_VARIABLES, n=1)
        advice = "torch knows no such variable and ignores it"
        advice += f"; did you mean {near[0]}?" if near else "; unset it"
        if name == "PYTORCH_MPS_ALLOCATOR_POLICY":
            advice = f"no torch has ever read it; the allocator is governed by {HIGH} and {LOW}"
        findings.append(Finding(variable=name, value=environ[name], verdict="warning", advice=advice))
    return findings


def _pair(environ: Mapping[str, str], *, allocator_initialized: bool | None) -> list[Finding]:
    if HIGH not in environ and LOW not in environ:
        return []
    try:
        high, low = ratio_of(environ, HIGH), ratio_of(environ, LOW)
    except ConfigurationError as error:
        bad = HIGH if HIGH in str(error) else LOW
        return [Finding(variable=bad, value=environ[bad], verdict="error", advice=str(error))]
    variable = HIGH if high is not None else LOW
    verdict, advice = _judge_pair(high, low)
    findings = [Finding(variable=variable, value=environ[variable], verdict=verdict, advice=advice)]
    if allocator_initialized:
        late = "the allocator exists already: set now, it has no effect; set both ratios before the first use of MPS"
        findings.append(Finding(variable=variable, value=environ[variable], verdict="note", advice=late))
    return findings


def _judge_pair(high: float | None, low: float | None) -> tuple[Verdict, str]:
    ceiling = DEFAULT_HIGH if high is None else high
    floor = DEFAULT_LOW if low is None else low
    if not 0 <= ceiling <= 2 or not 0 <= floor <= 2:
        return "error", f"HIGH {ceiling:g} with LOW {floor:g} is out of range: torch raises; both go from 0 to 2"
    if ceiling == 0:
        return "warning", "0 means no limit: the machine can swap until it stalls; use a ratio up to 1.0"
    if low is None and ceiling < DEFAULT_LOW:
        missing = (
            f"LOW is not set and stays at {DEFAULT_LOW}: torch raises 'invalid low watermark ratio 1.4' at first use"
        )
        return "error", f"{missing}; set {LOW}={0.85 * ceiling:.2f} as well"
    if floor > ceiling:
        return "error", f"LOW {floor:g} is above HIGH {ceiling:g}: torch raises at first use; set LOW to at most HIGH"
    if ceiling > 1:
        beyond = "ratios are shares of Metal's recommended working set, 2/3 to 0.84 of RAM"
        return "warning", f"{beyond}: {ceiling:g} can exceed the machine's memory; use a ratio up to 1.0"
    if floor == 0:
        return "note", "LOW of 0 turns off early freeing of cached blocks"
    return "ok", "a valid pair, in shares of Metal's recommended working set"


def _fallback(environ: Mapping[str, str]) -> list[Finding]:
    value = environ.get(_FALLBACK)
    if value in {None, "", "0"}:
        return []
    advice = "operators that MPS lacks run on the CPU: a copy each way, in the same memory, and a wait for the GPU"
    return [Finding(variable=_FALLBACK, value=str(value), verdict="note", advice=advice)]


def _allocator_settings(environ: Mapping[str, str]) -> list[Finding]:
    findings = []
    for variable in _ALLOCATOR_VARIABLES:
        text = environ.get(variable)
        if not text:
            continue
        problem = next(filter(None, map(_allocator_problem, text.split(","))), None)
        verdict: Verdict = "ok" if problem is None else "error"
        advice = problem or "its switches and shares can be read"
        findings.append(Finding(variable=variable, value=text, verdict=verdict, advice=advice))
    return findings


def _allocator_problem(entry: str) -> str | None:
    """Return the error in one `key:value`; only switches and the memory share are checked."""
    key, _, value = (part.strip() for part in entry.partition(":"))
    if key in _ALLOCATOR_SWITCHES and value not in {"True", "False"}:
        return f"torch reads only the words True and False there; write {key}:{value.capitalize() or 'True'}" + (
            "" if value.capitalize() in {"True", "False"} else ", with True or False as its value"
        )
    if key == "per_process_memory_fraction":
        try:
            share = float(value)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            return f"{key}:{value} is not a share; write a number from 0 to 1, as in {key}:0.85"
    return None


def _threads(environ: Mapping[str, str], *, cores: int | None, num_threads: int | None) -> list[Finding]:
    value = environ.get("OMP_NUM_THREADS")
    if value is None:
        return []

    def say(verdict: Verdict, advice: str) -> list[Finding]:
        return [Finding(variable="OMP_NUM_THREADS", value=value, verdict=verdict, advice=advice)]

    first = value.split(",")[0].strip()
    if not first.isdigit() or int(first) == 0:
        return say("warning", "not a count of threads, OpenMP ignores it; write a positive number")
    if cores is not None and int(first) > cores:
        return say(
            "warning",
            f"more threads than the {cores} cores this process may use: they wait for each other; use {cores}",
        )
    if num_threads is not None and num_threads != int(first):
        return say(
            "warning",
            f"torch uses {num_threads} threads: set after import it has no effect; call torch.set_num_threads",
        )
    return say("ok", "within the cores this process may use")
