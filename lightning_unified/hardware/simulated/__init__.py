"""Simulated machines: a CPU run sees another machine's memory, limits, errors and pressure."""

from lightning_unified.hardware.simulated.allocator import SimulatedAllocator
from lightning_unified.hardware.simulated.command_queue import Abort
from lightning_unified.hardware.simulated.machine import SimulatedMachine
from lightning_unified.hardware.simulated.profiles import PROFILES, Profile, profile

__all__ = ["PROFILES", "Abort", "Profile", "SimulatedAllocator", "SimulatedMachine", "profile"]
