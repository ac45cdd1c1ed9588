"""Capabilities of each machine, and their torch versions."""

import pytest

from lightning_unified.hardware import Sources, capabilities, capability, read

NAMES = [
    "bf16",
    "fp16",
    "float64",
    "autocast",
    "scaler",
    "fused_adam",
    "fused_adamw",
    "fused_sgd",
    "fused_with_scaler",
    "foreach",
    "compile",
    "pin_memory",
    "non_blocking",
    "flash_attention_training",
]


def ask(sources, device="auto"):
    return {entry.name: entry.value for entry in capabilities(device, sources=sources)}


def why(sources, name):
    return next(entry.reason for entry in capabilities("auto", sources=sources) if entry.name == name)


def test_every_machine_answers_the_same_questions_with_a_reason(any_machine):
    answers = capabilities("auto", sources=any_machine)

    assert [entry.name for entry in answers] == NAMES
    assert all(entry.reason for entry in answers)


def test_a_reading_at_hand_is_not_taken_again(machine):
    sources = machine("rtx4090")
    reading = read(sources=sources)
    sources.torch.cuda.mem_get_info = None

    assert capabilities(reading, sources=sources)[0].value == "native"


def test_an_unknown_capability_is_a_key_error(machine):
    known = capabilities("auto", sources=machine("rtx4090"))

    assert capability("bf16", known) == "native"
    with pytest.raises(KeyError, match="bf17"):
        capability("bf17", known)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rtx4090", "native"),
        ("t4", "emulated"),
        ("gb10", "native"),
        ("strix_halo", "native"),
        ("rx6750xt", "emulated"),
        ("m1", "emulated"),
        ("m2", "emulated"),
        ("m4_pro", "native"),
        ("cgroup_v1", "emulated"),
        ("cgroup_v2", "native"),
    ],
)
def test_bf16_is_native_only_where_the_chip_computes_it(machine, name, value):
    assert ask(machine(name))["bf16"] == value


def test_bf16_that_torch_refuses_is_none(machine):
    sources = machine("t4")

    def refuse(*args, **kwargs):
        raise RuntimeError("not implemented for bfloat16")

    sources.torch.ones = refuse

    assert ask(sources)["bf16"] == "none"


def test_bf16_of_an_arm_mac_is_asked_of_the_kernel(machine):
    sources = machine("mac_cpu")
    inner = sources.sysctl
    arm = machine("mac_cpu", sysctl=lambda name: 1 if name == "hw.optional.arm.FEAT_BF16" else inner(name))

    assert ask(arm)["bf16"] == "native"
    assert ask(sources)["bf16"] == "emulated"


def test_this_machines_bf16_agrees_with_torchs_own_look_at_the_processor():
    import torch

    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if torch.backends.cpu.get_cpu_capability() in {"DEFAULT", "SVE256"}:
        pytest.skip("torch's look covers x86 only")

    assert (ask(Sources.live(), "cpu")["bf16"] == "native") == native


@pytest.mark.parametrize(
    ("version", "scaler", "fused_with_scaler"),
    [("2.11.0", "mps", False), ("2.12.1", "mps", False), ("2.13.0", "mps", True)],
)
def test_the_scaler_on_mps_is_gated_by_torch(machine, version, scaler, fused_with_scaler):
    sources = machine("m2")
    sources.torch.__version__ = version
    answers = ask(sources)

    assert (answers["scaler"], answers["fused_with_scaler"]) == (scaler, fused_with_scaler)


@pytest.mark.parametrize(("name", "scaler"), [("rtx4090", "cuda"), ("rx6750xt", "cuda"), ("cgroup_v1", "none")])
def test_the_scaler_takes_the_name_of_torchs_device(machine, name, scaler):
    assert ask(machine(name))["scaler"] == scaler


def test_an_intel_gpus_scaler_and_bf16_are_its_own(machine):
    answers = ask(machine("lunar_lake"), "xpu")

    assert (answers["scaler"], answers["bf16"]) == ("xpu", "native")


def test_fused_kernels_are_read_off_torchs_own_list(machine):
    sources = machine("rtx4090")
    assert ask(sources)["fused_adamw"] is True
    sources.torch.utils._foreach_utils._get_fused_kernels_supported_devices = lambda: ["mps"]

    assert ask(sources)["fused_adamw"] is False


def test_a_torch_without_that_list_is_not_trusted_with_fused_kernels(machine):
    sources = machine("rtx4090")
    del sources.torch.utils

    assert ask(sources)["fused_adamw"] is False
    assert why(sources, "fused_adamw").startswith("unknown: ")


@pytest.mark.parametrize(("name", "foreach"), [("rtx4090", True), ("rx6750xt", True), ("m4_pro", False)])
def test_foreach_kernels_exist_on_gpus_but_not_on_mps(machine, name, foreach):
    assert ask(machine(name))["foreach"] is foreach


@pytest.mark.parametrize(("name", "double"), [("m4_pro", False), ("rtx4090", True), ("cgroup_v1", True)])
def test_float64_is_everywhere_but_on_metal(machine, name, double):
    assert ask(machine(name))["float64"] is double


@pytest.mark.parametrize(
    ("name", "pinned"),
    [
        ("rtx4090", True),
        ("gh200", True),
        ("gb10", False),
        ("strix_halo", False),
        ("m4_pro", False),
        ("cgroup_v1", False),
    ],
)
def test_pinning_pays_only_into_a_dedicated_pool(machine, name, pinned):
    assert ask(machine(name))["pin_memory"] is pinned


@pytest.mark.parametrize(
    ("name", "flash"), [("rtx4090", True), ("t4", False), ("m4_pro", False), ("strix_halo", True), ("cgroup_v1", True)]
)
def test_flash_attention_in_training_needs_a_backward_kernel(machine, name, flash):
    assert ask(machine(name))["flash_attention_training"] is flash


def test_attention_on_mps_names_the_matrix_it_keeps(machine):
    assert "B x H x S x S" in why(machine("m4_pro"), "flash_attention_training")


def test_a_rocm_build_without_the_flash_kernel_is_planned_as_math(machine):
    sources = machine("rx6750xt")
    sources.torch.backends.cuda.is_flash_attention_available = lambda: False

    assert ask(sources)["flash_attention_training"] is False


@pytest.mark.parametrize(("installed", "able"), [("triton", True), ("nothing", False)])
def test_compiling_for_a_gpu_needs_triton(machine, installed, able):
    assert ask(machine("rx6750xt", has_module=lambda name: name == installed))["compile"] is able


@pytest.mark.parametrize(("installed", "able"), [("clang++", True), ("rustc", False)])
def test_compiling_for_a_cpu_needs_a_compiler(machine, installed, able):
    sources = machine("cgroup_v1", which=lambda name: f"/usr/bin/{name}" if name == installed else None)

    assert ask(sources)["compile"] is able


def test_compiling_on_mps_is_called_a_prototype(machine):
    assert ask(machine("m4_pro", has_module=lambda name: True))["compile"] is False


def test_copies_to_metal_block(machine):
    assert ask(machine("m4_pro"))["non_blocking"] is False
    assert ask(machine("rtx4090"))["non_blocking"] is True
