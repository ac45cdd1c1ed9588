"""A missing package is answered with the extra that installs it."""

import sys

import pytest

from lightning_unified import models
from lightning_unified.cli.config.binding import target_of
from lightning_unified.cli.config.extras import extra_for, missing_packages
from lightning_unified.errors import ConfigurationError

DECLARED = [
    "torch>=2.11",
    'tokenizers>=0.20; extra == "models"',
    'tokenizers>=0.20; extra == "classifier"',
    'hydra-joblib-launcher>=1.2; extra == "sweep"',
    'ruff==0.17.5; extra == "dev"',
    'ruff==0.17.5; extra == "all"',
]
EXTRAS = {
    ("tokenizers", ""): "models",
    ("tokenizers", "lightning_unified.models.classifier.TextClassifier"): "classifier",
    ("hydra_joblib_launcher", ""): "sweep",
    ("ruff", ""): None,
    ("unknown", ""): None,
}


@pytest.mark.parametrize(("package", "target"), EXTRAS)
def test_the_extra_of_a_package_is_read_from_what_the_distribution_declares(package, target, monkeypatch):
    monkeypatch.setattr("lightning_unified.cli.config.extras.requires", lambda name: DECLARED)

    assert extra_for(package, target=target) == EXTRAS[package, target]


def test_the_missing_module_is_found_behind_other_errors():
    error = RuntimeError("cannot build")
    error.__cause__ = ModuleNotFoundError("No module named 'no_such_package.part'", name="no_such_package.part")

    assert list(missing_packages(error)) == ["no_such_package"]


def test_a_model_without_its_packages_names_the_extra(monkeypatch, caplog):
    for name in [name for name in sys.modules if name.startswith("lightning_unified.models.classifier")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(models, "classifier", raising=False)  # set where another test has imported it
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setattr("lightning_unified.cli.config.extras.requires", lambda name: DECLARED)

    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-unified\[classifier\]'"):
        target_of("lightning_unified.models.classifier.data.tokens.encoder_tokenizer.load_encoder_tokenizer")
    assert not caplog.records
