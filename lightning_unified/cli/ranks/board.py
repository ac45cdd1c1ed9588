"""Short texts that the ranks of a run share before they are connected and after they are lost."""

import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from lightning_unified.cli.failure import exit_code_of, report_failure
from lightning_unified.cli.ranks.launch import Launch, launch_of
from lightning_unified.errors import ConfigurationError, LightningUnifiedError, RankError

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  documented, but not exported

__all__ = ["Board", "is_connected"]

_WAIT = timedelta(minutes=5)  # ranks of a cluster start within minutes of each other
_SOON = timedelta(seconds=20)  # judgement: an error is printed after this time even if nobody can be asked
_READ, _ERROR = "read", "error"  # keys that count the ranks
_LINGER_S = (
    20.0  # judgement: the longest that rank 0 keeps the store for others, which start later and end for the same reason
)


class Board:
    """A key-value store over a socket, at the address at which the ranks meet.

    torchrun keeps a store for all its processes. Under SLURM the first rank opens the one that its process group uses later. Ranks
    that a strategy started use the store of their process group, once it exists.

    Args:
        launch: How this process was started; default is to look at its environment.
    """

    def __init__(self, launch: Launch | None = None) -> None:
        self.launch = launch_of(os.environ) if launch is None else launch
        self._store: Store | None = None

    def __reduce__(self) -> tuple[type["Board"], tuple[()]]:
        """Return how a copy in another process is made, which has a place of its own among the ranks."""
        return Board, ()

    def shared(self, key: str, text: str) -> str:
        """Return the first rank's `text` on every rank.

        Raises:
            RankError: If the first rank does not say it within five minutes.
        """
        if not self.launch.is_external:
            return text
        try:
            store = self._opened(_WAIT)
            if self.launch.is_first:
                store.set(key, text)
                return text
            said = store.get(key).decode()
            store.add(_READ, 1)
            return said
        except RuntimeError as error:
            raise RankError(f"rank 0 has not said where the run is kept: {error}", missing=(0,)) from error

    def report(self, error: BaseException) -> int:
        """Print `error` unless another rank has printed the reason, and return its exit code."""
        if isinstance(error, RankError) and error.failed:
            return exit_code_of(error)  # the rank that failed says why
        code = report_failure(error) if self._claims() else exit_code_of(error)
        gone = len(error.missing) if isinstance(error, RankError) else 0
        self._linger(_ERROR, self.launch.size - gone, _LINGER_S)
        return code

    def leave(self) -> None:
        """Let all ranks read what the first one has said before this process ends and takes its store along."""
        self._linger(_READ, self.launch.size - 1, _WAIT.total_seconds())

    @property
    def _hosts(self) -> bool:
        """Whether the store ends with this process.

        torchrun may keep it (torch 2.13, distributed/rendezvous.py).
        """
        kept = self.launch.by == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        return self.launch.is_external and self.launch.is_first and not kept

    def _linger(self, key: str, count: int, limit_s: float) -> None:
        """Keep the store until `count` ranks have counted themselves under `key`."""
        if not self._hosts:
            return
        end = time.monotonic() + limit_s
        with suppress(RuntimeError, OSError):
            while time.monotonic() < end and self._opened(_SOON).add(key, 0) < count:
                time.sleep(0.1)

    def _claims(self) -> bool:
        """Return whether this rank is the first that has an error to print; True if nobody can be asked."""
        if self.launch.by == "user" and self.launch.size == 1 and not is_connected():
            return True
        try:
            return self._opened(_SOON).add(_ERROR, 1) == 1
        except (RuntimeError, OSError, LightningUnifiedError):
            return True

    def _opened(self, patience: timedelta) -> "Store":
        if self._store is None:
            from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._store = PrefixStore(f"lightning_unified/{attempt}", self._connected(patience))
        return self._store

    def _connected(self, patience: timedelta) -> "Store":
        if self.launch.by == "torchrun":
            return _store_at(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), patience, hosts=self._hosts)
        if self.launch.by == "slurm":
            return _store_at(*_slurm_address(), patience, hosts=self._hosts)
        if not is_connected():
            raise RankError("the ranks are not connected")
        from torch.distributed.distributed_c10d import _get_default_store

        return _get_default_store()


def _store_at(address: str, port: int, patience: timedelta, *, hosts: bool) -> "Store":
    """Return the store at an address.

    Its host shares one server with the process group, which opens a store there later.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return TCPStore(address, port, is_master=hosts, timeout=patience, wait_for_workers=False, multi_tenant=hosts)


def is_connected() -> bool:
    """Return whether this process has a process group; torch is not imported to find out."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _slurm_address() -> tuple[str, int]:
    """Return the address that Lightning derives from SLURM's variables, so that all ranks use one."""
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    try:
        environment = SLURMEnvironment()
        return environment.main_address, environment.main_port
    except RuntimeError as error:  # it names the variable that srun did not set
        raise ConfigurationError(str(error)) from error
