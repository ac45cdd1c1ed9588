"""The dispatch modes in which a block runs."""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["BlockMode"]


class BlockMode(TorchDispatchMode):
    """Dispatch mode around one run of a block.

    Compiled functions in the block run compiled, unseen.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled."""
        return True
