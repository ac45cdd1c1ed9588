# ruff: noqa: INP001
"""Check an installed wheel: the configuration composes, and every module can be imported.

Run it from another folder than the checkout.
"""

import importlib
import pkgutil
import sys
from importlib.util import find_spec
from pathlib import Path

import lightning_unified

where = Path(lightning_unified.__file__).resolve()
if not where.is_relative_to(Path(sys.argv[1]).resolve()):
    sys.exit(f"lightning_unified was imported from {where}, not from the wheel")

from hydra import compose, initialize_config_module  # noqa: E402

with initialize_config_module("lightning_unified.conf", version_base="1.3"):
    for overrides in ([], ["memory=small", "hardware=mps"], ["experiment=diagnostics"]):
        compose("train", overrides=overrides)
NEEDS = dict.fromkeys(("triton_kernels", "triton_draw"), ("triton",))  # which comes with torch's CUDA builds only
names = [
    module.name
    for module in pkgutil.walk_packages(lightning_unified.__path__, "lightning_unified.")
    if "__main__" not in module.name and all(map(find_spec, NEEDS.get(module.name.rpartition(".")[2], ())))
]
for name in names:
    importlib.import_module(name)
print(f"{len(names)} modules imported from {where.parent}; the configuration composes")
