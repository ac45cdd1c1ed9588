"""Only versions of Lightning that the step was tested with are accepted."""

import subprocess
import sys

import pytest

from lightning_unified.errors import ConfigurationError
from lightning_unified.strategies import require_tested_lightning


@pytest.mark.parametrize("version", ["2.6.0", "2.6.6", "2.6.7.dev1"])
def test_the_tested_version_is_accepted(version):
    require_tested_lightning(version)


@pytest.mark.parametrize("version", ["2.7.0", "2.5.5", "3.0", "2.60.1"])
def test_another_version_is_refused_with_the_command_that_installs_the_tested_one(version):
    with pytest.raises(
        ConfigurationError, match=rf"lightning {version} is installed.*pip install 'lightning>=2\.6,<2\.7'"
    ):
        require_tested_lightning(version)


@pytest.mark.slow
def test_the_import_of_the_strategy_says_so():
    code = (
        "import lightning; lightning.__version__ = '2.7.0'; import lightning_unified; lightning_unified.UnifiedStrategy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "lightning 2.7.0 is installed" in done.stderr.splitlines()[-1]
