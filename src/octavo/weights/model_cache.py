"""The folder fetched models are kept in: where it is, how a file gets there whole, and how it is known again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeAlias

from octavo.errors import DownloadError

__all__ = ["Progress", "cache_root", "exclusive", "is_verified", "models_dir", "reporting_growth", "store"]

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Told about a download: what is fetched, bytes so far, bytes in all where known."""

COPY_BYTES = 1 << 20


def cache_root() -> Path:
    """The folder for what octavo can make again: $OCTAVO_CACHE, or its own in the platform's cache folder."""
    chosen = os.environ.get("OCTAVO_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "octavo"


def models_dir() -> Path:
    """The folder of the fetched models, made if it does not exist."""
    path = cache_root() / "models"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DownloadError(
            f"the model cache {path} cannot be made: {error.strerror}; set OCTAVO_CACHE to a folder that can be written"
        ) from error
    return path


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock of the file to be made at ``path``: one process fetches, the others wait and find it there."""
    with open(path.with_name(path.name + ".lock"), "a+b") as lock:
        if sys.platform == "win32":
            import msvcrt

            lock.seek(0)
            msvcrt.locking(lock.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256.json")


def is_verified(path: Path, size: int, sha256: str) -> bool:
    """Whether ``path`` holds the content with that SHA-256, without reading it again when it was checked before.

    The stamp beside the file records the size and time of change the check was made for; without it the file is
    hashed.
    """
    try:
        status = path.stat()
    except OSError:
        return False
    if status.st_size != size:
        return False
    expected = {"sha256": sha256, "size": size, "mtime_ns": status.st_mtime_ns}
    try:
        if json.loads(stamp_path(path).read_bytes()) == expected:
            return True
    except (OSError, ValueError, RecursionError):
        pass  # no stamp, or a damaged one: the file itself decides
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(COPY_BYTES):
            digest.update(piece)
    if digest.hexdigest() != sha256:
        return False
    write_stamp(path, sha256)
    return True


def write_stamp(path: Path, sha256: str) -> None:
    """Record that ``path``, as it is now, was found to have this SHA-256."""
    status = path.stat()
    content = json.dumps({"sha256": sha256, "size": status.st_size, "mtime_ns": status.st_mtime_ns})
    # A cache that cannot be written costs a hash at the next start, nothing more.
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".stamp-")
        with os.fdopen(handle, "w") as file:
            file.write(content)
        os.replace(name, stamp_path(path))


def store(source: IO[bytes], temporary: Path, path: Path, size: int, sha256: str) -> None:
    """Copy ``source`` to ``path``, by way of ``temporary``: checked for size and SHA-256, and there only once whole."""
    digest, written = hashlib.sha256(), 0
    with open(temporary, "wb") as target:
        while written <= size and (piece := source.read(COPY_BYTES)):
            written += len(piece)
            digest.update(piece)
            target.write(piece)
        target.flush()
        os.fsync(target.fileno())
    if written != size or digest.hexdigest() != sha256:
        raise DownloadError(
            f"{path.name}: what was fetched has {written} bytes and SHA-256 {digest.hexdigest()}, "
            f"expected {size} bytes and {sha256}; it was not kept"
        )
    os.replace(temporary, path)
    write_stamp(path, sha256)


def folder_bytes(folder: Path) -> int:
    """The bytes of all files below ``folder``; files may come and go meanwhile."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_size
    return total


@contextlib.contextmanager
def reporting_growth(folder: Path, what: str, total: int | None, progress: Progress | None) -> Iterator[None]:
    """Report how far a download is by how much ``folder`` grows: works with any tool and needs none of its output."""
    if progress is None:
        yield
        return
    before, done = folder_bytes(folder), threading.Event()
    progress(what, 0, total)

    def watch() -> None:
        told = 0
        while not done.wait(0.1):
            grown = max(folder_bytes(folder) - before, told)
            if grown != told:
                told = grown
                progress(what, told if total is None else min(told, total), total)

    thread = threading.Thread(target=watch, name="octavo-download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if total is not None:
        progress(what, total, total)
