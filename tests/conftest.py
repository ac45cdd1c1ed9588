"""Guards for every test.

Each test has one thread, and leaves random state, environment and working directory as they were.
"""

import copy
import functools
import gc
import io
import logging
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import pytest

gc.disable()  # until all test files are imported: collections over the growing heap take a sixth of that time

# Else each process compiles the package and the tests anew, which takes longer than most tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell that starts the tests in the background ignores SIGINT; children and handlers would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of programs that tests start: each core has a worker already

# programs that tests start, from any folder, import this checkout and keep the other paths
ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])

_STATE = tempfile.TemporaryDirectory(prefix="lightning-unified-state-")  # removed when the process ends
os.environ["LIGHTNING_UNIFIED_STATE_DIR"] = _STATE.name  # no test writes to the home
os.environ["LIGHTNING_UNIFIED_CACHE"] = _STATE.name

_LEVELS: dict[str, int] = {}


def pytest_configure(config):
    """Import torch and Lightning where tests run: the process that only starts workers waits for no import."""
    if not config.getoption("numprocesses", None):
        _import_and_set()


def _import_and_set():
    import torch
    from hypothesis import HealthCheck, settings
    from lightning.fabric.utilities import registry
    from omegaconf import OmegaConf

    # No test asserts wall time, and a busy machine draws slowly.
    settings.register_profile("any-speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any-speed")

    torch.set_num_threads(1)

    # Each Trainer searches all installed packages for callbacks, which takes longer than the rest of its construction.
    registry.entry_points = functools.cache(registry.entry_points)
    OmegaConf.load = _loaded_once(OmegaConf.load)
    for absent in (torch.cuda, torch.mtia, torch.xpu):
        # a seed for an absent device is queued with a stack trace, a millisecond each
        if not absent.is_available():
            absent.manual_seed_all = lambda seed: None

    for name in ("lightning.pytorch", "lightning.fabric", "lightning_unified"):
        _LEVELS[name] = logging.getLogger(name).level


def _loaded_once(load):
    """Return a `load` that parses the same text once.

    Parsing is a third of a composition, and each one reads twenty files.
    """
    parsed = functools.cache(lambda text: load(io.StringIO(text)))

    def loaded(file):
        if hasattr(file, "read"):
            return copy.deepcopy(parsed(file.read()))
        return load(file)

    return loaded


# Files of many seconds: they run first, so that no worker has a long one left when the others are done.
LONG = {
    "test_faults.py",
    "test_run.py",
    "test_ddp.py",
    "test_fitting.py",
    "test_unified.py",
    "test_resume.py",
    "test_checkpoint_files.py",
    "test_real_limit.py",
    "test_recovery_corners.py",
    "test_stop.py",
    "test_conf.py",
    "test_lightning_hooks.py",
    "test_fsdp.py",
    "test_fsdp_checkpoints.py",
    "test_torchrun.py",
    "test_trust.py",
    "test_attention.py",
    "test_shared_dry_runs.py",
    "test_planner_dry_runs.py",
    "test_families.py",
    "test_kept_activations.py",
    "test_mistakes.py",
    "test_plan_devices.py",
    "test_predict.py",
    "test_repeated_blocks.py",
    "test_fsdp_checks.py",
    "test_simulate.py",
    "test_same_as_whole.py",
    "test_going_on.py",
    "test_fsdp_users.py",
    "test_fsdp_plans.py",
    "test_pytorch_lightning.py",
    "test_sums_of_means.py",
    "test_loss_chunk.py",
    "test_rounding.py",
    "test_class_weights.py",
}


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message):
    """Give a library's warning a class of Python, before a worker sends it.

    The process that only starts workers would import Lightning, and torch with it, for the class.
    """
    kind = warning_message.category
    if kind.__module__ != "builtins":
        warning_message.message = UserWarning(f"{kind.__name__}: {warning_message.message}")
        warning_message.category = UserWarning


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _small_heap():
    """Freeze all objects before each test file.

    The collection after each out-of-memory error then visits only newer objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_world_after(monkeypatch):
    """Start each test from seed 0 and restore the process state.

    That is the environment, the levels of loggers, generators and default dtype.
    """
    import torch

    environment, directory, dtype = dict(os.environ), os.getcwd(), torch.get_default_dtype()
    random.seed(0)
    torch.manual_seed(0)
    for name, level in _LEVELS.items():  # before the test: a fixture of its file may have trained quietly
        if (logger := logging.getLogger(name)).level != level:  # setting it empties the caches of all loggers
            logger.setLevel(level)
    yield
    assert torch.get_default_dtype() == dtype, "the test changed the default dtype"
    monkeypatch.undo()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
