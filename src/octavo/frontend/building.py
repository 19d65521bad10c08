"""`octavo build`: a model made ready to run, in a folder that is mapped at every start instead of being packed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from octavo.backends.cpu.built import LAYOUT, write_weights
from octavo.backends.cpu.lowering import BLOCK_SIZE, Lowered, lower
from octavo.backends.cpu.sizes import step_shape
from octavo.errors import ConfigError, ModelError
from octavo.frontend.description import ModelDescription, describe_model
from octavo.kv_cache import kv_cache_type
from octavo.planning.hardware import probe
from octavo.planning.units import format_bytes
from octavo.weights.built import (
    GGUF_METADATA,
    TUNING,
    VECTORS,
    WEIGHTS,
    BuiltCheckpoint,
    BuiltWeight,
    Manifest,
    file_digest,
    is_built,
    write_manifest,
)
from octavo.weights.gguf import GgufCheckpoint
from octavo.weights.hub import TOKENIZER_FILES
from octavo.weights.kv_scales import is_kv_scale

__all__ = ["BuildResult", "build_model"]

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The folder that was made, its bytes, and how many weights run in which form."""

    path: Path
    total_bytes: int
    forms: dict[str, int]


def build_model(
    model: Path,
    output: Path,
    *,
    name: str | None = None,
    quantization: str | None = None,
    threads: int | None = None,
    tune_seconds: float = 0.0,
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> BuildResult:
    """Pack a model into the folder ``output``, which appears only when it is whole.

    ``name``: what the model is called in messages, by default its path. ``tune_seconds`` above 0 measures tile shapes
    for this machine afterwards and keeps them in the folder. ``force`` replaces a built model that is there. Raises
    ConfigError when ``output`` cannot be used, ModelError when the model cannot be built.
    """
    _check_output(output, force)
    output.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        with describe_model(model) as description:
            if isinstance(description.checkpoint, BuiltCheckpoint):
                raise ModelError(f"{model} is a built model already; build from the one it was made from")
            lowered = _write(description, work, name or str(model), quantization, threads, progress)
        if tune_seconds > 0:
            _tune(work, threads, tune_seconds, progress)
        work.chmod(0o755)
        _put_in_place(work, output)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    forms: dict[str, int] = {}
    for packing in lowered.packings:
        forms[str(packing.form)] = forms.get(str(packing.form), 0) + 1
    return BuildResult(output, sum(file.stat().st_size for file in output.iterdir()), forms)


def _check_output(output: Path, force: bool) -> None:
    if not os.path.lexists(output):
        return
    if not output.is_dir() or (any(output.iterdir()) and not is_built(output)):
        raise ConfigError(f"{output} exists and is no built model: it is left alone; name a new folder")
    if is_built(output) and not force:
        raise ConfigError(f"{output} is a built model already; name a new folder, or replace it with --force")


def _write(
    description: ModelDescription,
    work: Path,
    name: str,
    quantization: str | None,
    threads: int | None,
    progress: Progress,
) -> Lowered:
    """Write everything but the tuning."""
    checkpoint, workers = description.checkpoint, threads or probe().default_threads
    # Packed weights do not depend on the size of steps or the type of the KV cache.
    lowered = lower(
        description.graph,
        checkpoint,
        quantization=quantization,
        kv=kv_cache_type("auto"),
        shape=step_shape(64, 1, BLOCK_SIZE),
    )
    needed = sum(packing.nbytes for packing in lowered.packings)
    if needed > shutil.disk_usage(work).free:
        raise ConfigError(
            f"{work.parent}: {format_bytes(needed)} are needed, {format_bytes(shutil.disk_usage(work).free)} are free"
        )
    weights = write_weights(lowered.packings, work / WEIGHTS, workers, lambda done, total: progress(name, done, total))
    scales = {scale: checkpoint.tensor(scale).read_f32() for scale in filter(is_kv_scale, checkpoint.names())}
    save_file(lowered.vectors | scales, work / VECTORS)
    (work / VECTORS).chmod(0o644)
    _write_json(work / "config.json", checkpoint.config)
    if checkpoint.generation_config:
        _write_json(work / "generation_config.json", checkpoint.generation_config)
    if isinstance(checkpoint, GgufCheckpoint):
        (work / GGUF_METADATA).write_bytes(checkpoint.metadata_alone())
    else:
        for file in TOKENIZER_FILES:
            if (checkpoint.path / file).is_file():
                shutil.copyfile(checkpoint.path / file, work / file)
    _write_manifest(work, name, checkpoint.format, quantization, weights)
    return lowered


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_manifest(
    work: Path, name: str, source_format: str, quantization: str | None, weights: Iterable[BuiltWeight]
) -> None:
    import octavo

    files = {file.name: file_digest(file) for file in sorted(work.iterdir()) if file.name != WEIGHTS}
    write_manifest(
        work,
        Manifest(
            LAYOUT,
            octavo.__version__,
            name,
            source_format,
            quantization,
            (work / WEIGHTS).stat().st_size,
            list(weights),
            files,
        ),
    )


def _tune(work: Path, threads: int | None, seconds: float, progress: Progress) -> None:
    """Measure with the folder as it is, and write its manifest anew."""
    from octavo.frontend.tuning import tune_model

    manifest = BuiltCheckpoint(work).manifest
    tune_model(
        str(work),
        threads=threads,
        output=work / TUNING,
        seconds=seconds,
        progress=lambda bucket, share: progress(f"measuring {bucket[0]} rows and more", 0, 0),
    )
    _write_manifest(work, manifest.source, manifest.source_format, manifest.quantization, manifest.weights)


def _put_in_place(work: Path, output: Path) -> None:
    """Give the finished folder its name. Engines that run the model it replaces keep the files they have mapped."""
    if not os.path.lexists(output):
        os.rename(work, output)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    os.rename(output, old / "replaced")
    try:
        os.rename(work, output)
    except OSError:
        os.rename(old / "replaced", output)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
