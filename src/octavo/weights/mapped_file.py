"""A read-only memory-mapped file whose pages can be handed back to the system once a tensor has been consumed."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.errors import WeightsError

__all__ = ["MappedFile"]


class MappedFile:
    """The bytes of a regular file, mapped. Arrays made from it stay valid for as long as they live."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: opening a FIFO somebody put in place of a weight file must not hang.
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            raise WeightsError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise WeightsError(f"{path}: is not a regular file")
            self.size = status.st_size
            if self.size == 0:
                raise WeightsError(f"{path}: is empty (0 bytes)")
            try:
                self.map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise WeightsError(f"{path}: cannot be memory-mapped: {error}") from error
        finally:
            os.close(descriptor)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.map, dtype=np.uint8)

    def release(self, start: int, stop: int) -> None:
        """Drop the pages inside [start, stop) from this process; the file brings them back when they are read again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = stop // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self.map.madvise(mmap.MADV_DONTNEED, first, last - first)
