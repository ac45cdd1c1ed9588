"""The strategies that a Trainer takes: `unified`, `unified_ddp` and `unified_fsdp`."""

import lightning

from lightning_unified.errors import ConfigurationError

__all__ = ["UnifiedDDPStrategy", "UnifiedFSDPStrategy", "UnifiedStrategy"]


def require_tested_lightning(version: str) -> None:
    """Refuse versions of Lightning whose private loop the step was not tested with.

    Raises:
        ConfigurationError: If `version` is not 2.6.
    """
    if version.split(".")[:2] != ["2", "6"]:
        raise ConfigurationError(
            f"lightning {version} is installed; lightning_unified is tested with lightning 2.6, whose private loop it extends. Run: pip install "
            "'lightning>=2.6,<2.7'"
        )


require_tested_lightning(lightning.__version__)  # before modules that import private names of Lightning

from lightning_unified.strategies.ddp import UnifiedDDPStrategy  # noqa: E402
from lightning_unified.strategies.fsdp import UnifiedFSDPStrategy  # noqa: E402
from lightning_unified.strategies.unified import UnifiedStrategy  # noqa: E402
