"""The device that a caller names: its backend, whether it is here, its bytes and its speeds."""

import torch

from lightning_unified.cost_model.rates import Rates, typical_rates
from lightning_unified.cost_model.rates.calibration import Calibration
from lightning_unified.errors import BudgetError, ConfigurationError
from lightning_unified.hardware import parse_spec, read, resolve_budget

__all__ = ["backend_of", "budget_bytes", "calibration_of", "speeds_of"]

_BACKENDS = ("cpu", "cuda", "rocm", "mps")


def backend_of(device: str | torch.device) -> str:
    """Return the backend of a device: `"cpu"`, `"cuda"`, `"rocm"` or `"mps"`.

    Raises:
        ConfigurationError: If the device is not one of these.
    """
    name = str(device).partition(":")[0]
    if name not in _BACKENDS:
        raise ConfigurationError(f"device={str(device)!r}: steps are predicted for {', '.join(_BACKENDS)}.")
    return "rocm" if name == "cuda" and torch.version.hip else name


def budget_bytes(spec: str | int, device: str | torch.device) -> int:
    """Return the bytes of a budget on a device.

    Raises:
        BudgetError: If the budget cannot be parsed, or depends on a device that is not here.
    """
    written = parse_spec(spec)
    if written.kind == "bytes":
        return int(written.amount)
    if not _is_here(device):
        raise BudgetError(f"budget={spec!r} depends on {device}, which is not here; give an amount, as in 16GiB.")
    return resolve_budget(spec, read(_real(device))).bytes


def _real(device: str | torch.device) -> torch.device:
    return torch.device(str(device).replace("rocm", "cuda"))


def _is_here(device: str | torch.device) -> bool:
    real = _real(device).type
    if real == "cuda" and (torch.version.hip is None) == (backend_of(device) == "rocm"):
        return False
    return {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}.get(real, lambda: True)()


def speeds_of(device: str | torch.device, *, rates: Rates | None, calibration: Calibration | None) -> tuple[Rates, str]:
    """Return the speeds to plan with, and their source in words."""
    if rates is not None:
        return rates, f"of {rates.name}, as given"
    if calibration is not None:
        assert calibration.rates is not None
        return calibration.rates, f"of {calibration.rates.name}, measured"
    typical = typical_rates(backend_of(device))
    return (
        typical,
        f"of {typical.name}, published; {device} is not here to be measured, and rates=tabled_rates(…) names another",
    )


def calibration_of(device: str | torch.device) -> Calibration | None:
    """Return the kept measurements of a device; None if this machine has no such device.

    Its speeds and the gain of aligned sizes are measured now if they never were.
    """
    if not _is_here(device):
        return None
    real = _real(device)
    known = Calibration.of(read(real))
    known.speeds(real)
    return known
