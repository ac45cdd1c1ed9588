"""What is built holds everything, and claims only what is tested."""

import re
import tomllib

from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = dict(
    line.split("==")
    for line in (ROOT / "requirements.lock").read_text().splitlines()
    if "==" in line and not line.startswith("#")
)


def name_of(requirement):
    return re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_every_package_of_the_tree_is_listed():
    packages = {"lightning_unified.conf"}
    for folder in [ROOT / "lightning_unified", *(ROOT / "lightning_unified").rglob("*")]:
        if folder.is_dir() and any(folder.glob("*.py")):
            packages.add(".".join(folder.relative_to(ROOT).parts))

    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages


def test_the_lock_pins_torch_exactly_and_names_no_build_or_index():
    text = (ROOT / "requirements.lock").read_text()

    assert LOCK["torch"] == "2.13.0"
    assert "+" not in "".join(LOCK.values())
    assert not re.search(r"^(--|nvidia|triton)|https?://", text, re.MULTILINE)


def test_the_lock_holds_every_dependency_and_every_extra():
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [
        *PROJECT["project"]["dependencies"],
        *(
            each for extra in set(extras) - {"docs", "ray"} for each in extras[extra]
        ),  # docs has its own environment, pinned where it stands; ray contradicts joblib
    ]
    locked = {name.lower().replace("_", "-") for name in LOCK}

    assert {name_of(each) for each in asked} - {"lightning-unified"} <= locked


def test_only_what_is_tested_is_claimed():
    """The first and the last cell of `ci/matrix` are the versions that pyproject.toml allows."""
    project = PROJECT["project"]
    cells = re.findall(r"3\.(\d+)-2\.(\d+)", (ROOT / "ci" / "matrix").read_text("utf-8").partition("|| cells=")[2])
    pythons, torches = ({int(cell[side]) for cell in cells} for side in (0, 1))

    assert project["requires-python"] == f">=3.{min(pythons)},<3.{max(pythons) + 1}"
    assert f"torch>=2.{min(torches)},<2.{max(torches) + 1}" in project["dependencies"]
    assert "lightning>=2.6,<2.7" in project["dependencies"]
    assert {"models", "data", "pretrained", "classifier", "sweep", "cluster", "ray", "dev", "docs", "all"} == set(
        project["optional-dependencies"]
    )


def test_the_configuration_is_shipped_from_its_folder():
    assert PROJECT["tool"]["setuptools"]["package-dir"]["lightning_unified.conf"] == "conf"
    assert (ROOT / "conf" / "__init__.py").is_file()
    assert "**/*.yaml" in PROJECT["tool"]["setuptools"]["package-data"]["lightning_unified.conf"]


def test_the_words_of_wordle_are_shipped():
    assert PROJECT["tool"]["setuptools"]["package-data"]["lightning_unified.models.wordle.game"] == ["words.txt"]
    assert (ROOT / "lightning_unified" / "models" / "wordle" / "game" / "words.txt").is_file()
