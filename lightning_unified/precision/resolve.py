"""Resolve the precisions given to Trainer and strategy into the one plugin that runs."""

from dataclasses import replace

import torch
from lightning.pytorch.plugins import precision as stock

from lightning_unified.errors import PrecisionError
from lightning_unified.precision.gate import Platform, PrecisionChoice, choose_precision, full_name
from lightning_unified.precision.mixed import MixedPrecision, live_scaler

__all__ = ["build_plugin", "plugin_precision", "resolve_precision", "resolve_simulated"]

_STOCK = (stock.Precision, stock.MixedPrecision, stock.HalfPrecision, stock.DoublePrecision, MixedPrecision)


def plugin_precision(plugin: stock.Precision | None) -> str:
    """Return Lightning's name of the precision `plugin` runs."""
    return str(getattr(plugin, "precision", "32-true"))


def resolve_precision(
    given: stock.Precision | None, *, asked: str, platform: Platform
) -> tuple[PrecisionChoice, stock.Precision]:
    """Return the precision of the run, and its plugin built for the device in use.

    Lightning 2.6.6 builds its plugin from the accelerator *flag* (accelerator_connector.py) and assumes "cuda" if the flag is
    an object. Then autocast and scaler are disabled on every other device, and the module trains in float32.

    Args:
        given: The Trainer's plugin: made from its flag, the user's own, or one that the strategy carried.
        asked: The strategy's own precision; `"trainer"` leaves it to the Trainer.
        platform: Platform of the run.

    Raises:
        PrecisionError: If the two contradict each other, or the platform cannot run the requested precision.
    """
    asked, flag = full_name(asked), plugin_precision(given)
    own = given is not None and type(given) not in _STOCK
    if asked != "trainer" and (own or (asked != "auto" and flag not in ("32-true", asked))):
        said = type(given).__name__ if own else repr(flag)
        raise PrecisionError(f"the strategy was given precision={asked!r} and the Trainer {said}; give one of them.")
    if given is not None and own:
        scaler = live_scaler(given) is not None
        return PrecisionChoice(precision=flag, scaler=scaler, reason="as the Trainer's own plugin says"), given
    if asked == "trainer" or (asked == "auto" and flag != "32-true"):
        choice = replace(_followed(given, flag, platform), reason="as the Trainer says")
    else:
        choice = choose_precision(asked, platform=platform)
    return choice, build_plugin(choice, device_type=platform.device_type, given=given)


def resolve_simulated(
    given: stock.Precision | None, *, asked: str, simulated: Platform, here: Platform
) -> tuple[PrecisionChoice, stock.Precision]:
    """Return the precision of a simulated platform and its plugin, as near as this CPU allows.

    Float16 becomes bfloat16, which takes as many bytes: a CPU has no gradient scaler in Lightning.

    `given` and `asked` are those of `resolve_precision`; `here` is this CPU.

    Raises:
        PrecisionError: If the simulated platform cannot run the requested precision.
    """
    asked, flag = full_name(asked), plugin_precision(given)
    follows = asked == "trainer" or (asked == "auto" and flag != "32-true")
    choice = choose_precision(flag if follows else asked, platform=simulated)
    is_float16 = choice.precision.startswith("16-")
    runs = f"bf{choice.precision}" if is_float16 else choice.precision
    resolved, plugin = resolve_precision(given, asked="trainer" if follows else runs, platform=here)
    reason = "as the Trainer says" if follows else choice.reason
    how = (
        "run in bfloat16, which takes as many bytes, because a CPU has no gradient scaler"
        if is_float16
        else "computed by this CPU"
    )
    return replace(resolved, reason=f"{reason}; {how}"), plugin


def _followed(given: stock.Precision | None, flag: str, platform: Platform) -> PrecisionChoice:
    """Return the choice that follows the Trainer.

    A live scaler for a CPU, which only a user makes, permits float16 there.
    """
    scaler = live_scaler(given) if given is not None else None
    if platform.backend == "cpu" and flag == "16-mixed" and scaler is not None and scaler._device == "cpu":
        return PrecisionChoice(precision=flag, scaler=True, reason="")
    return choose_precision(flag, platform=platform)


def build_plugin(choice: PrecisionChoice, *, device_type: str, given: stock.Precision | None = None) -> stock.Precision:
    """Return the plugin of `choice` on a device type such as `"cpu"`, `"cuda"` or `"mps"`.

    Args:
        choice: Precision to run.
        device_type: Device type of the run.
        given: Plugin to replace. Its gradient scaler is kept if it is live on this device, because it may be the user's own
            with other settings.

    Raises:
        PrecisionError: If `given` was made for this device with a scaler that is disabled, or is for another device.
    """
    if choice.precision in ("16-mixed", "bf16-mixed"):
        scaler = None
        if choice.scaler and isinstance(given, stock.MixedPrecision) and given.precision == choice.precision:
            scaler = _scaler_here(given, device_type)
        return MixedPrecision(choice.precision, device_type=device_type, scaler=scaler)
    if given is not None and plugin_precision(given) == choice.precision:
        return given
    if choice.precision in ("16-true", "bf16-true"):
        return stock.HalfPrecision(choice.precision)  # type: ignore[arg-type]
    return stock.DoublePrecision() if choice.precision == "64-true" else stock.Precision()


def _scaler_here(given: stock.MixedPrecision, device_type: str) -> torch.amp.GradScaler | None:
    scaler = live_scaler(given)
    if scaler is not None and scaler._device == device_type:
        return scaler
    if given.device == device_type:
        what = "is disabled" if scaler is None else f"is for {scaler._device}"
        raise PrecisionError(
            f"plugins=[MixedPrecision('16-mixed', {device_type!r}, scaler=…)]: its gradient scaler {what}, so float16 gradients would go "
            f"unscaled; give torch.amp.GradScaler({device_type!r}), or Trainer(precision='16-mixed') and no plugin."
        )
    return None
