"""docs/how-to/install.md gives the commands that the package itself would give."""

import re

import pytest

from lightning_unified.hardware.environment.torch_builds import Machine, choose_build, pip_arguments
from tests.support import ROOT

PAGE = (ROOT / "docs" / "how-to" / "install.md").read_text()
RELEASE = re.search(r"^torch==(.*)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)[1]
LINUX, CARD = {"platform": "linux", "machine": "x86_64"}, {"nvidia": True, "driver": (580,)}
ROWS = {
    "Mac with Apple silicon": {"platform": "darwin", "machine": "arm64", "macos": (14,)},
    "Linux, NVIDIA GPU, driver 580": LINUX | CARD,
    "Linux, NVIDIA GPU, driver 525.60": LINUX | CARD | {"driver": (579,)},
    "Linux x86-64, AMD GPU": LINUX | {"amd": True},
    "Linux, no GPU": LINUX,
    "Windows, NVIDIA GPU": CARD | {"platform": "win32", "machine": "AMD64"},
}


@pytest.mark.parametrize("start", ROWS)
def test_each_machine_of_the_page_gets_the_command_of_the_package(start):
    (command,) = re.findall(rf"^\| {re.escape(start)}.*\| `pip install (.*)` \|$", PAGE, re.MULTILINE)
    machine = Machine(**ROWS[start])

    assert command.split() == pip_arguments(choose_build(machine).build, RELEASE, platform=machine.platform)


def test_the_page_has_every_extra():
    project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]

    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(
        re.findall(r"^(\w+) = \[", project, re.MULTILINE)
    )
