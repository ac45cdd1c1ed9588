"""The shipped configuration: every leaf fits its target, every combination composes.

Precedence is as documented.
"""

import copy
import inspect
from functools import cache

import pytest
from omegaconf import OmegaConf, open_dict

from lightning_unified.cli.config.binding import arguments_of, check_binding, target_of, targets
from lightning_unified.cli.config.composition import composed, groups, searching
from lightning_unified.cli.config.overrides import check_overrides
from lightning_unified.errors import ConfigurationError
from tests.support import ROOT
from tests.support.lanes import crossed, first_cells, some

TIERS = {
    "debug": ("up to 4GiB", 4, 4),
    "small": ("up to 8GiB", 8, 4),
    "medium": ("up to 16GiB", 16, 4),
    "large": ("up to 28GiB", 32, 4),
    "optimal": ("up to 32GiB", 64, 8),
}
HARDWARE = ("auto", "cpu", "cuda", "dgx_spark", "jetson", "mps", "rocm", "strix_halo")
MODELS = (
    "classifier",
    "classifier-tiny",
    "compressor-125m",
    "compressor-small",
    "compressor-smollm2",
    "finetune",
    "finetune-tiny",
    "finetune/gemma3_1b",
    "finetune/llama3_2_1b",
    "finetune/llama3_2_3b",
    "finetune/qwen2_5_0_5b",
    "finetune/qwen2_5_1_5b",
    "finetune/qwen2_5_3b",
    "finetune/qwen3_0_6b",
    "finetune/qwen3_1_7b",
    "finetune/smollm2_1_7b",
    "finetune/smollm2_360m",
    "gearhead",
    "gearhead-118m",
    "gearhead-34m",
    "gearhead-small",
    "wordle",
    "wordle-tiny",
    "wordle/qwen2_5_0_5b",
    "wordle/qwen2_5_3b",
)
EXPERIMENTS = [
    "classification",
    "compression",
    "compression-smollm2",
    "diagnostics",
    "gearhead-34m",
    "gearhead-34m-cuda",
    "gearhead-34m-mps",
    "gearhead-34m-rocm",
    "wordle",
    "wordle-seed-after",
    "wordle-seed-before",
]


@pytest.fixture(autouse=True, scope="module")
def _search_path():
    with searching(str(ROOT / "conf")):
        yield


@cache
def composed_once(*overrides):
    """Return a configuration that no test may change: each composition takes a tenth of a second."""
    return composed(overrides).config


def compose(*overrides):
    """Return a configuration that can be changed and compared: its ``run_dir`` names no time."""
    config = copy.deepcopy(composed_once(*overrides))
    with open_dict(config):
        config["run_dir"] = "runs/here"
    return config


def test_the_groups_offer_what_the_documentation_says():
    offered = groups()

    assert set(offered["memory"]) == {*TIERS, "auto"}
    assert tuple(offered["hardware"]) == HARDWARE
    assert tuple(offered["model"]) == MODELS
    assert {"builtin", "botocore", "dtc", "files", "pydoc"} <= set(offered["data"])


def test_every_model_brings_data_of_its_own_name():
    assert set(MODELS) <= set(groups()["data"])


FUNCTIONS = {"micro_batches"}  # arguments that hold functions, which no file can write: the module declares them


@pytest.mark.parametrize("together", [("memory", "hardware", "trainer", "callbacks", "logger", "model"), ("data",)])
def test_a_leaf_writes_exactly_the_arguments_of_its_target(together):
    """Each composition takes the next choice of several groups.

    One composition takes a tenth of a second. A model brings the data of its name.
    """
    offered = groups()
    offered["data"] = [name for name in offered["data"] if name not in MODELS]
    for turn in range(max(len(offered[group]) for group in together)):
        chosen = {group: offered[group][turn % len(offered[group])] for group in together}
        config = compose(*(f"{group}={choice}" for group, choice in chosen.items()))
        if "model" in chosen:
            chosen["data"] = chosen["model"]
        for group, choice in chosen.items():
            for name, leaf in targets(OmegaConf.to_container(config[group], resolve=False), name=group):
                arguments = {
                    key
                    for key, parameter in arguments_of(target_of(leaf["_target_"])).items()
                    if parameter.kind is not inspect.Parameter.VAR_KEYWORD and key not in FUNCTIONS
                }

                assert {key for key in leaf if key != "_target_"} == arguments, (
                    f"{name} ({choice}) and {leaf['_target_']} differ"
                )


@first_cells(
    1,
    ("model", "hardware"),
    crossed(MODELS, HARDWARE, fast=[("gearhead", "cpu"), ("classifier-tiny", "mps"), ("wordle-tiny", "cuda")]),
)
def test_every_combination_composes_and_round_trips(model, hardware):
    for memory in groups()["memory"]:
        config = compose(f"memory={memory}", f"hardware={hardware}", f"model={model}")
        OmegaConf.resolve(config)

        assert config.hardware.name == hardware
        if memory == "auto":  # reading YAML is slow
            assert OmegaConf.create(OmegaConf.to_yaml(config)) == config


@first_cells(
    2,
    "choice",
    [("data", name) for name in ("builtin", "botocore", "dtc", "pydoc")] + [("model", name) for name in MODELS],
    ids="=".join,
)
def test_what_composes_binds_to_the_signatures(choice):
    check_binding(
        compose(
            "=".join(choice),
            "hardware=cpu",
            "hardware.num_workers=0",
            "hardware.persistent_workers=false",
            "hardware.prefetch_factor=null",
            "hardware.start_method=null",
        )
    )


@first_cells(4, "experiment", EXPERIMENTS)
def test_every_experiment_composes_under_its_own_name(experiment):
    assert compose(f"experiment={experiment}").name == experiment


def test_the_experiments_tested_are_all_there_are():
    assert groups()["experiment"] == EXPERIMENTS


@first_cells(1, ("experiment", "model"), [("compression", "small"), ("compression-smollm2", "smollm2")])
def test_an_experiment_in_compression_brings_its_data_and_is_judged_as_it_trains(experiment, model):
    config = compose(f"experiment={experiment}")

    assert config.model.preset == f"compressor-{model}"
    assert config.data == compose(f"data=compressor-{model}", f"hardware={config.hardware.name}").data
    assert config.callbacks.compression.directory == f"{config.run_dir}/compression"


def test_the_classification_experiment_keeps_the_best_and_stops_by_a_chosen_metric():
    chosen = ("callbacks.checkpoint.monitor=val/brier", "callbacks.checkpoint.mode=min")
    found = compose("experiment=classification", *chosen).callbacks

    assert (found.early_stopping.monitor, found.early_stopping.mode) == ("val/brier", "min")
    assert compose("experiment=classification").callbacks.checkpoint.monitor == "val/macro_f1"


@first_cells(1, ("experiment", "tokens", "rows", "recompute"), [("before", 512, 2, False), ("after", 128, 1, True)])
def test_the_seeds_settings_of_wordle_are_those_of_its_table(experiment, tokens, rows, recompute):
    config = compose(f"experiment=wordle-seed-{experiment}")
    completions = config.data.batch_size * config.model.group_size

    assert config.model.preset == "wordle-qwen2_5_3b"
    assert (config.model.max_new_tokens, completions, config.memory.micro_batch_size) == (tokens, 2, rows)
    assert config.memory.recompute is recompute
    assert (config.callbacks.checkpoint.every_n_steps, config.callbacks.checkpoint.keep) == (50, 3)


def test_wordle_knows_the_phases_of_its_data_and_is_judged_by_games():
    config = compose("experiment=wordle", "data.sft_steps=7", "data.inner_iterations=2")

    assert (config.model.sft_steps, config.model.inner_iterations) == (7, 2)
    assert (config.callbacks.checkpoint.monitor, config.callbacks.checkpoint.mode) == ("val/win_rate", "max")
    assert config.callbacks.wordle.directory == f"{config.run_dir}/wordle"


@first_cells(1, "tier", TIERS)
def test_a_tier_is_the_budget_batch_and_micro_batch_of_the_table(tier):
    config = compose(f"memory={tier}")

    assert (config.memory.budget, config.data.batch_size, config.memory.micro_batch_size) == TIERS[tier]


def test_the_automatic_tier_has_no_batch_of_its_own():
    for data in ("builtin", "files"):
        own = OmegaConf.load(ROOT / "conf" / "data" / f"{data}.yaml").batch_size

        assert compose("memory=auto", f"data={data}").data.batch_size == own


@first_cells(
    1,
    ("hardware", "rows", "length", "recompute"),
    [
        ("cuda", 8, 1024, False),
        ("rocm", 2, 512, True),
        ("mps", 4, 512, True),
        ("dgx_spark", 8, 1024, False),
        ("strix_halo", 2, 512, True),
    ],
)
def test_hardware_decides_how_the_34m_model_splits_its_batch_of_32(hardware, rows, length, recompute):
    config = compose("model=gearhead-34m", f"hardware={hardware}")

    assert (
        config.data.batch_size,
        config.memory.micro_batch_size,
        config.data.sequence_length,
        config.memory.recompute,
    ) == (32, rows, length, recompute)


@first_cells(
    1,
    ("hardware", "rows", "pin_memory"),
    [
        ("mps", 64, False),
        ("cuda", 32, "auto"),
        ("rocm", 32, "auto"),
        ("dgx_spark", 32, False),
        ("jetson", 32, False),
        ("cpu", 16, False),
    ],
)
def test_hardware_decides_rows_and_pinning_of_the_classifier(hardware, rows, pin_memory):
    config = compose("data=classifier", f"hardware={hardware}", f"platform=classifier/{hardware}")

    assert (config.data.batch_size, config.data.pin_memory) == (rows, pin_memory)
    assert config.data.num_workers == "auto"  # decided once, for doctor, plan and run


def test_the_command_line_beats_the_rows_of_the_classifier_and_memory_does_not():
    chosen = ("data=classifier", "hardware=mps", "platform=classifier/mps")

    assert compose(*chosen, "memory=small").data.batch_size == 64  # the classifier's own on this hardware
    own = compose(*chosen, "memory=small", "data.batch_size=24", "hardware.num_workers=1").data
    assert (own.batch_size, own.num_workers) == (24, 1)


def test_precedence_is_command_line_then_experiment_then_memory_then_hardware():
    hardware = compose("model=gearhead-34m", "hardware=cuda")
    memory = compose("model=gearhead", "hardware=cuda", "memory=small")
    experiment = compose("experiment=gearhead-34m-cuda", "memory=small")
    line = compose("experiment=gearhead-34m-cuda", "memory=small", "trainer.max_steps=7", "data.batch_size=6")

    assert (hardware.data.batch_size, memory.data.batch_size, line.data.batch_size) == (32, 8, 6)
    assert (experiment.trainer.max_steps, line.trainer.max_steps) == (5000, 7)
    assert memory.trainer.max_steps == OmegaConf.load(ROOT / "conf/trainer/default.yaml").max_steps


def test_precision_follows_the_hardware():
    assert compose("hardware=cpu", "hardware.precision=bf16-mixed").memory.precision == "bf16-mixed"


def test_an_unknown_argument_is_refused_with_the_nearest():
    with pytest.raises(ConfigurationError, match=r"model\.learning_rat: .*did you mean learning_rate\?"):
        check_binding(compose("hardware=cpu", "+model.learning_rat=0.1"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.learning_rate=fast", r"model\.learning_rate=fast: it must be a number"),
        ("model.layers=2.5", r"model\.layers=2\.5: it must be a whole number or null"),
        ("model.recompute=7", r"model\.recompute=7: it must be true or false"),
        ("model.schedule=linea", r"one of linear, cosine, constant; did you mean linear\?"),
        ("model._target_=lightning_unified.models.gearhead.GearHed", r"GearHed cannot be imported"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(override, message):
    plain = (
        "hardware.num_workers=0",
        "hardware.persistent_workers=false",
        "hardware.prefetch_factor=null",
        "hardware.start_method=null",
    )

    check_binding(compose("hardware=cpu", *plain))
    with pytest.raises(ConfigurationError, match=message):
        check_binding(compose("hardware=cpu", *plain, override))


def test_a_choice_in_a_subfolder_belongs_to_its_group_and_a_wrong_one_is_refused():
    assert (
        check_overrides(["model=wordle/qwen2_5_3b"], multirun=False).config.data.pretrained
        == "Qwen/Qwen2.5-3B-Instruct"
    )
    with pytest.raises(ConfigurationError, match=r"model=wordle/qwen2_5_4b: .* did you mean wordle/qwen2_5_3b\?"):
        check_overrides(["model=wordle/qwen2_5_4b"], multirun=False)


@first_cells(
    1,
    ("model", "own"),
    [
        ("gearhead", set()),
        ("classifier-tiny", {"early_stopping", "length", "report"}),
        ("compressor-smollm2", {"compression"}),
        ("wordle-tiny", {"wordle"}),
        ("wordle/qwen2_5_0_5b", {"wordle"}),
    ],
)
def test_a_model_brings_its_own_callbacks(model, own):
    default, left_out = (composed_once(f"model={model}", *more).callbacks for more in ([], ["~model_callbacks"]))

    assert set(default) - set(left_out) == own
    assert (default.checkpoint.monitor == "val/loss") == (not own - {"compression"})


@first_cells(1, "model", some(MODELS, "gearhead", "classifier-tiny"))
def test_a_models_callbacks_are_those_of_the_default_and_stay_beside_cuda_graphs(model):
    default, plain, graphs = (
        compose(f"model={model}", *more).callbacks for more in ([], ["callbacks=default"], ["callbacks=graphs"])
    )

    assert default == plain
    assert set(graphs) - set(default) == {"cuda_graphs"}


def test_callbacks_named_beside_their_model_are_the_same():
    for model in ("classifier", "wordle"):
        assert compose(f"model={model}", f"callbacks={model}").callbacks == compose(f"model={model}").callbacks
