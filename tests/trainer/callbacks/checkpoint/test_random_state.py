"""The states of all random streams, on machines with other accelerators too."""

import io
import random
from types import SimpleNamespace

import numpy as np
import torch
from lightning.fabric.utilities.seed import _collect_rng_states

from lightning_unified.callbacks.checkpoint import random_state
from lightning_unified.callbacks.checkpoint.continuation import Continuation
from lightning_unified.step.recovery.generators import GeneratorWatch


class Generators:
    """Stands for `torch.cuda`, `torch.xpu` or `torch.mps`.

    It has `count` generators whose states can be read and set.
    """

    def __init__(self, count):
        self.states = [torch.tensor([index], dtype=torch.uint8) for index in range(count)]

    def device_count(self):
        return len(self.states)

    def get_rng_state(self):
        return self.states[0].clone()

    def get_rng_state_all(self):
        return [state.clone() for state in self.states]

    def set_rng_state(self, state, index=0):
        self.states[index] = state


def machine(**accelerators):
    return SimpleNamespace(get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state, **accelerators)


def draws():
    return torch.rand(2).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()


def test_every_stream_of_the_cpu_goes_on_where_it_was():
    random.gauss(0, 1)  # leaves a second value in store
    np.random.randn()
    state = random_state.capture("cpu")
    expected = draws()
    draws()

    assert random_state.restore(state, device_type="cpu") == []
    assert draws() == expected


def test_a_state_passes_through_a_file_of_plain_values():
    file = io.BytesIO()
    state = random_state.capture("cpu")
    expected = draws()
    torch.save(state, file)
    file.seek(0)
    random_state.restore(torch.load(file, weights_only=True), device_type="cpu")

    assert draws() == expected


def test_mps_goes_on_where_it_was():
    mps = Generators(1)
    state = random_state.capture("mps", namespace=machine(mps=mps))
    mps.states[0] = torch.tensor([77], dtype=torch.uint8)

    assert random_state.restore(state, device_type="mps", namespace=machine(mps=mps)) == []
    assert mps.states[0].item() == 0


def test_all_devices_of_cuda_and_xpu_go_on_where_they_were():
    for kind in ("cuda", "xpu"):
        before = machine(**{kind: Generators(2)})
        after = machine(**{kind: Generators(2)})
        getattr(after, kind).states = [torch.tensor([9], dtype=torch.uint8)] * 2

        assert (
            random_state.restore(random_state.capture(kind, namespace=before), device_type=kind, namespace=after) == []
        )
        assert [state.item() for state in getattr(after, kind).states] == [0, 1]


def test_other_accelerators_of_the_machine_are_left_alone():
    assert set(random_state.capture("cpu", namespace=machine(mps=None, cuda=None))) == {"torch", "python", "numpy"}


def test_a_generator_that_is_not_here_is_named():
    two, one = machine(cuda=Generators(2)), machine(cuda=Generators(1))
    state = random_state.capture("cuda", namespace=two)

    assert random_state.restore(state, device_type="cuda", namespace=one) == [
        "cuda generators 1 to 1: 1 devices are here"
    ]
    assert random_state.restore(state, device_type="mps", namespace=machine(mps=Generators(1))) == [
        "the mps generator: the checkpoint was written without one"
    ]


def test_one_process_gathers_its_own_state():
    assert random_state.gather({"a": 1}) == [{"a": 1}]


def mocked_mps(monkeypatch):
    mps = Generators(1)
    monkeypatch.setattr(torch.mps, "get_rng_state", mps.get_rng_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", mps.set_rng_state)
    return mps


def trainer_on(kind, **changes):
    loop = SimpleNamespace(_should_accumulate=lambda: False)
    strategy = SimpleNamespace(root_device=torch.device(kind))
    return SimpleNamespace(
        **{"strategy": strategy, "fit_loop": loop, "world_size": 1, "global_rank": 0, "is_last_batch": True, **changes}
    )


def test_lightning_alone_leaves_the_generator_of_mps_out(monkeypatch):
    mocked_mps(monkeypatch)

    assert not any("mps" in name for name in _collect_rng_states())


def test_a_resumed_run_on_mps_finds_its_generator_as_the_checkpoint_has_it(monkeypatch):
    mps, checkpoint = mocked_mps(monkeypatch), {}
    Continuation().note(trainer_on("mps"), torch.nn.Module(), checkpoint, called_off=False)
    mps.states[0] = torch.tensor([77], dtype=torch.uint8)
    resumed = Continuation()
    resumed.load(checkpoint)
    resumed.before_loaders(trainer_on("mps"))

    assert mps.states[0].item() == 0


def test_a_run_that_moves_from_cpu_to_mps_says_that_this_generator_starts_anew(monkeypatch):
    logged, checkpoint = [], {}
    mocked_mps(monkeypatch)
    monkeypatch.setattr("lightning_unified.callbacks.checkpoint.continuation.rank_zero_info", logged.append)
    Continuation().note(trainer_on("cpu"), torch.nn.Module(), checkpoint, called_off=False)
    resumed = Continuation()
    resumed.load(checkpoint)
    resumed.before_loaders(trainer_on("mps"))

    assert len(logged) == 1
    assert "not restored: the mps generator: the checkpoint was written without one" in logged[0]


def test_a_repeated_step_on_mps_draws_the_same_numbers(monkeypatch):
    mps, device = mocked_mps(monkeypatch), torch.device("mps")
    watch = GeneratorWatch(device)
    noted = watch.note()
    mps.states[0] = torch.tensor([77], dtype=torch.uint8)
    watch.restore(noted)

    assert mps.states[0].item() == 0
