"""Output of doctor, on this machine and on others."""

import json

import pytest
from rich.console import Console

from lightning_unified.cli.doctor import _print, diagnose, main, read_tiers
from tests.support.programs import run_program

GIB = 2**30
KEYS = ["reading", "pool", "budgets", "tier", "capabilities", "environment", "hardware"]


@pytest.fixture
def conf(tmp_path):
    """Three tiers as the configuration writes them, one with an interpolation."""
    folder = tmp_path / "conf" / "memory"
    folder.mkdir(parents=True)
    for name, budget, micro, batch in (
        ("tiny", "512MiB", "2", "data:\n  batch_size: 2\n"),
        ("huge", "4000GiB", "8", "data:\n  batch_size: 64\n"),
        ("auto", "auto", "${platform.micro_batch_size}", ""),
    ):
        (folder / f"{name}.yaml").write_text(
            f"# @package _global_\nmemory:\n  budget: {budget}\n  micro_batch_size: {micro}\n{batch}"
        )
    return tmp_path / "conf"


def test_json_has_exactly_the_agreed_keys_and_nothing_else_on_standard_output(capsys):
    assert main(["--json"]) == 0
    printed = json.loads(capsys.readouterr().out)

    assert list(printed) == KEYS
    assert set(printed["reading"]["total"]) == {"bytes", "source"}
    assert set(printed["capabilities"][0]) == {"name", "value", "reason"}
    assert printed["pool"] == printed["reading"]["pool"]


def test_the_command_runs_as_a_module_from_another_folder(tmp_path):
    done = run_program("lightning_unified", "doctor", "--json", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)) == KEYS


def test_the_tables_print_without_arguments(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out

    assert "This machine has" in printed
    assert "hardware=auto would choose" in printed


def test_help_is_help(capsys):
    assert main(["--help"]) == 0
    assert "--json" in capsys.readouterr().out


def test_an_unknown_argument_makes_no_sense(capsys):
    assert main(["--yaml"]) == 2
    assert "unrecognized arguments: --yaml" in capsys.readouterr().err


def test_a_device_that_is_not_here_makes_no_sense(capsys):
    assert main(["--device", "tpu"]) == 2
    captured = capsys.readouterr()

    assert "device 'tpu' has no reader" in captured.err
    assert captured.out == ""


def test_no_machine_makes_it_crash(any_machine, conf):
    diagnosis = diagnose(sources=any_machine, conf=conf)
    json.dumps(diagnosis.as_json())
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    _print(diagnosis, console)

    assert "Capabilities" in console.export_text()


def test_the_largest_fixed_tier_that_fits_now_is_named(machine, conf):
    diagnosis = diagnose(sources=machine("rtx4090"), conf=conf)

    assert diagnosis.tier == "tiny"
    assert list(diagnosis.tiers) == ["tiny", "huge", "auto"]


def test_a_tier_above_the_pool_keeps_its_amount_and_says_why_not(machine, conf):
    huge = diagnose(sources=machine("rtx4090"), conf=conf).tiers["huge"]

    assert (huge.fits, huge.fits_now, huge.bytes) == (False, False, 4000 * GIB)
    assert "is above the pool" in huge.reason


def test_a_tier_within_the_pool_that_others_fill_does_not_fit_now(machine, conf):
    sources = machine("rtx4090")
    sources.torch.cuda.mem_get_info = lambda index: (0, 24 * GIB)
    sources.torch.cuda.memory_allocated = sources.torch.cuda.memory_reserved = lambda index: 2**28
    tiny = diagnose(sources=sources, conf=conf).tiers["tiny"]

    assert (tiny.fits, tiny.fits_now) == (True, False)


def test_auto_is_the_tier_where_no_fixed_one_fits(machine, conf):
    (conf / "memory" / "tiny.yaml").unlink()

    assert diagnose(sources=machine("rtx4090"), conf=conf).tier == "auto"


def test_a_machine_that_says_nothing_has_no_tier(machine, conf):
    (conf / "memory" / "tiny.yaml").unlink()

    assert diagnose(sources=machine("bare"), conf=conf).tier is None


def test_an_interpolation_of_another_group_is_left_open(machine, conf):
    auto = diagnose(sources=machine("rtx4090"), conf=conf).tiers["auto"]

    assert (auto.batch_size, auto.micro_batch_size) == (None, None)


def test_without_configuration_there_are_no_tiers(tmp_path):
    assert read_tiers(tmp_path) == {}


def test_the_shipped_tiers_are_found():
    assert {"debug", "small", "medium", "large", "optimal", "auto"} <= set(read_tiers())


def test_the_environment_is_judged_before_the_reading_completes_it(machine, recorder, conf):
    sources = machine("m4_pro")
    recorder.environ["PYTORCH_MPS_HIGH_WATERMARK_RATIO"] = "0.9"
    findings = diagnose(sources=sources, conf=conf).environment

    assert [(f.variable, f.verdict) for f in findings] == [("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "error")]


def test_what_auto_would_choose_does_not_depend_on_the_device_looked_at(machine, conf):
    diagnosis = diagnose("cpu", sources=machine("rtx4090"), conf=conf)

    assert (diagnosis.reading.backend, diagnosis.hardware, diagnosis.settings.accelerator) == ("cpu", "cuda", "cuda")


def test_brackets_in_a_name_are_only_brackets(machine, conf):
    sources = machine("rtx4090")
    sources.torch.cuda.get_device_properties(0).name = "Card [red]X[/red]"
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    _print(diagnose(sources=sources, conf=conf), console)

    assert "Card [red]X[/red]" in console.export_text()
