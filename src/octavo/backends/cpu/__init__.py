"""The CPU back end: a graph becomes a plan for the native library, run once per step."""

from octavo.backends.cpu.backend import CpuBackend
from octavo.backends.cpu.sizes import CpuSizes, cpu_sizes

__all__ = ["CpuBackend", "CpuSizes", "cpu_sizes"]
