"""Packed weights in a file: written once by `octavo build`, mapped at every start after it.

The file is a region as it would be in memory, so that nothing is computed when it is mapped; what the page cache holds
of it is shared by all processes that run the model. Where the file system's page cache has huge pages (ext4 and XFS of
recent kernels) the file is read at the speed of memory: it is dropped from the cache once written, as pages that were
written are small ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo._native import PackedWeight, Region, checksum64
from octavo.backends.cpu.packing import Packing, fill_all, region_bytes
from octavo.errors import WeightsError
from octavo.weights.built import WEIGHTS, BuiltCheckpoint, BuiltWeight

__all__ = ["LAYOUT", "attach_weights", "write_weights"]

# Of the bytes of all packed forms together: raised whenever those of one of them change.
LAYOUT = 1
# Packed bytes that are in memory at once while writing.
_BATCH_BYTES = 128 << 20


def write_weights(
    packings: Sequence[Packing], path: Path, threads: int, progress: Callable[[int, int], None]
) -> list[BuiltWeight]:
    """Pack every weight into a new file in bounded memory; `progress` is told packed and all bytes."""
    size = region_bytes(packings)
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk must be found out now, not in the middle of a write
        file.flush()
    region = Region.map_file(str(path), size, True)
    weights = [packing.allocate(region) for packing in packings]
    built: list[BuiltWeight] = []
    start, batch, ends = 0, 0, _ends(weights, region)
    for stop in range(1, len(packings) + 1):
        batch += packings[stop - 1].nbytes
        if batch < _BATCH_BYTES and stop < len(packings):
            continue
        fill_all(packings[start:stop], weights[start:stop], threads)
        for index in range(start, stop):
            built.append(_described(packings[index], region, weights[index], ends[index]))
        region.flush()
        progress(ends[stop - 1], region.used)
        start, batch = stop, 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return built


def attach_weights(packings: Sequence[Packing], source: BuiltCheckpoint, threads: int) -> list[PackedWeight]:
    """Map the weights of a built model; refuses them, by name, if they are not what `packings` need or are damaged."""
    manifest, path = source.manifest, source.path / WEIGHTS
    again = f"build the model again from {manifest.source}"
    if manifest.layout != LAYOUT:
        raise WeightsError(
            f"{source.path}: was built by octavo {manifest.octavo} with layout {manifest.layout} of packed weights, "
            f"this octavo has layout {LAYOUT}; {again}"
        )
    for packing, weight in zip(packings, manifest.weights, strict=False):
        found = (weight.names, weight.rows, weight.columns, weight.k, weight.form)
        wanted = (*_identity(packing), packing.count, packing.k, packing.form.as_record())
        if found != wanted:
            raise WeightsError(
                f"{source.path}: holds weight {weight.names[0]!r} where this octavo wants {wanted[0][0]!r}, or in "
                f"another form (it was built by octavo {manifest.octavo}); {again}"
            )
    size = region_bytes(packings)
    if len(packings) != len(manifest.weights) or size != manifest.weights_bytes:
        raise WeightsError(
            f"{source.path}: holds {len(manifest.weights)} weights in {manifest.weights_bytes} bytes, this octavo "
            f"wants {len(packings)} in {size} (it was built by octavo {manifest.octavo}); {again}"
        )
    try:
        actual = path.stat().st_size
        if actual != size:
            raise WeightsError(f"{path}: is {actual} bytes long, {size} were written; {again}")
        region = Region.map_file(str(path), size, False)
    except (OSError, RuntimeError, ValueError) as error:
        raise WeightsError(f"{path}: cannot be mapped ({error}); {again}") from error
    weights = [packing.allocate(region) for packing in packings]
    ends = _ends(weights, region)

    def check(index: int) -> None:
        stored = manifest.weights[index]
        if _checksum(region, weights[index], ends[index]) != stored.checksum:
            raise WeightsError(
                f"{path}: weight {', '.join(stored.names)} was changed or damaged after the build (checksum); {again}"
            )

    with ThreadPoolExecutor(threads, thread_name_prefix="octavo-check") as pool:
        for _ in pool.map(check, range(len(weights))):
            pass
    return weights


def _ends(weights: Sequence[PackedWeight], region: Region) -> list[int]:
    """Where each weight ends: where the next one begins."""
    return [*(weight.offset for weight in weights[1:]), region.used]


def _checksum(region: Region, weight: PackedWeight, end: int) -> str:
    return f"{checksum64(region.bytes[weight.offset : end]):016x}"


def _identity(packing: Packing) -> tuple[list[str], list[int]]:
    return [tensor.name for tensor in packing.tensors], [tensor.shape[0] for tensor in packing.tensors]


def _described(packing: Packing, region: Region, weight: PackedWeight, end: int) -> BuiltWeight:
    return BuiltWeight(
        *_identity(packing),
        packing.count,
        packing.k,
        packing.form.as_record(),
        end - weight.offset,
        _checksum(region, weight, end),
    )
