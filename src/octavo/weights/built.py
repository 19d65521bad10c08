"""A model that `octavo build` made: its manifest, read with distrust, and the checkpoint it stands for.

A built model is a folder: `octavo.json` (the manifest, with a checksum over itself and over every other file),
`weights.bin` (packed weights exactly as the kernels read them), `vectors.safetensors` (norms, biases and other small
tensors), config.json, generation_config.json, the tokenizer's files, and `tuning.json` where it was tuned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from octavo.errors import ParameterError, WeightsError
from octavo.weights.gguf_file import GgufFile
from octavo.weights.json_files import MAX_JSON_FILE_BYTES, read_json_object
from octavo.weights.safetensors_files import SafetensorsFile
from octavo.weights.tensors import DenseTensor, Float32Array, Tensor, Uint16Array

__all__ = [
    "GGUF_METADATA",
    "MANIFEST",
    "TUNING",
    "VECTORS",
    "WEIGHTS",
    "BuiltCheckpoint",
    "BuiltRows",
    "BuiltWeight",
    "Manifest",
    "file_digest",
    "is_built",
    "write_manifest",
]

MANIFEST, WEIGHTS, VECTORS, TUNING = "octavo.json", "weights.bin", "vectors.safetensors", "tuning.json"
# The metadata of the GGUF file a model was built from, its vocabulary among them, without any tensor.
GGUF_METADATA = "metadata.gguf"
FORMAT = 1

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Names = Annotated[list[str], msgspec.Meta(min_length=1, max_length=1 << 16)]


class BuiltWeight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One packed weight: the tensors it is made of with their rows, its shape and form, its bytes and checksum."""

    names: _Names
    rows: list[_Count]
    columns: _Count
    k: _Count
    form: dict[str, str | int | float | bool | None]
    bytes: _Count
    checksum: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a built model holds, and what it was made from and by."""

    layout: int
    octavo: str
    source: str
    source_format: str
    quantization: str | None
    weights_bytes: _Count
    weights: list[BuiltWeight]
    files: dict[str, str]


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    sha256: str
    manifest: msgspec.Raw


class _Header(msgspec.Struct):
    """What every format begins with."""

    format: int


@dataclass(frozen=True)
class BuiltRows:
    """Stands for rows that are packed already: only their form is known."""

    path: Path
    name: str
    weight: BuiltWeight

    def _refuse(self) -> NoReturn:
        raise WeightsError(
            f"{self.path}: tensor {self.name!r} is packed for running and its rows cannot be read back; "
            "use the model it was built from"
        )

    def dense_rows(self, start: int, stop: int) -> Float32Array:
        self._refuse()

    def bit_rows(self, start: int, stop: int) -> Uint16Array | None:
        self._refuse()

    def release(self) -> None:
        """Nothing was read."""


class BuiltCheckpoint:
    """A built model, its manifest and small files checked; the packed weights are checked when they are mapped."""

    format = "built"
    notes: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = _read_manifest(path / MANIFEST)
        for name, digest in self.manifest.files.items():
            self._check_file(name, digest)
        self.config = read_json_object(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = read_json_object(generation) if generation.is_file() else {}
        gguf = path / GGUF_METADATA
        self.gguf_metadata: Mapping[str, Any] | None = GgufFile(gguf).metadata if gguf.is_file() else None
        self._vectors = SafetensorsFile(path / VECTORS)
        self._packed: dict[str, DenseTensor] = {}
        for weight in self.manifest.weights:
            if len(weight.rows) != len(weight.names):
                raise WeightsError(
                    f"{path / MANIFEST}: weight {weight.names[0]!r} has {len(weight.names)} names for "
                    f"{len(weight.rows)} counts of rows"
                )
            for name, rows in zip(weight.names, weight.rows, strict=True):
                self._packed[name] = DenseTensor(name, (rows, weight.k), "bf16", BuiltRows(path, name, weight))

    def _check_file(self, name: str, digest: str) -> None:
        if name != Path(name).name:
            raise WeightsError(f"{self.path / MANIFEST}: {name[:120]!r} is not the name of a file of the same folder")
        try:
            found = file_digest(self.path / name)
        except OSError as error:
            raise WeightsError(
                f"{self.path}: {name} cannot be read ({error.strerror}); build the model again from "
                f"{self.manifest.source}"
            ) from error
        if found != digest:
            raise WeightsError(
                f"{self.path}: {name} was changed or damaged after the build (its SHA-256 is not the one in "
                f"{MANIFEST}); build the model again from {self.manifest.source}"
            )

    def check_quantization(self, wanted: str | None) -> None:
        """Refuse another weight form than the one that was built."""
        built = self.manifest.quantization
        if wanted not in (None, built):
            raise ParameterError(
                "quantization",
                wanted,
                f"{built} or left out",
                f"quantization must be {'left out' if built is None else f'{built} or left out'}, got {wanted!r}: "
                f"{self.path} holds weights that were packed when it was built; build it again from "
                f"{self.manifest.source} with --quantization {wanted}",
            )

    def names(self) -> list[str]:
        return [*self._packed, *self._vectors.entries]

    def tensor(self, name: str) -> Tensor:
        packed = self._packed.get(name)
        if packed is not None:
            return packed
        if name not in self._vectors.entries:
            raise WeightsError(
                f"{self.path}: has no tensor {name!r}, which this octavo reads and {self.manifest.octavo} did not; "
                f"build the model again from {self.manifest.source}"
            )
        return self._vectors.tensor(name)

    def close(self) -> None:
        self._packed = {}


def is_built(path: Path) -> bool:
    """Whether a folder is a built model."""
    return (path / MANIFEST).is_file()


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a folder, with the checksum over itself; it does not list itself."""
    manifest.files.pop(MANIFEST, None)
    body = msgspec.json.encode(manifest)
    envelope = _Envelope(FORMAT, hashlib.sha256(body).hexdigest(), msgspec.Raw(body))
    (folder / MANIFEST).write_bytes(msgspec.json.encode(envelope) + b"\n")


def _read_manifest(path: Path) -> Manifest:
    again = "build the model again"
    with path.open("rb") as source:
        data = source.read(MAX_JSON_FILE_BYTES + 1)
    if len(data) > MAX_JSON_FILE_BYTES:
        raise WeightsError(f"{path}: is larger than {MAX_JSON_FILE_BYTES} bytes, the limit for a JSON file")
    try:
        found = msgspec.json.decode(data, type=_Header).format
        if found != FORMAT:
            raise WeightsError(
                f"{path}: was built in format {found}, this octavo reads format {FORMAT}; {again} with this octavo"
            )
        envelope = msgspec.json.decode(data, type=_Envelope)
        if hashlib.sha256(envelope.manifest).hexdigest() != envelope.sha256:
            raise WeightsError(f"{path}: was changed or damaged after the build (checksum); {again}")
        return msgspec.json.decode(envelope.manifest, type=Manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: is damaged ({' '.join(str(error).split())[:200]}); {again}") from error
