"""Work in progress: a checksummed file for every finished layer, so that a stopped run can be taken up again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ConfigError, WeightsError
from octavo.ptq.formats.layout import WrittenTensor
from octavo.ptq.grid import Float32Array
from octavo.weights.json_files import read_json_object
from octavo.weights.safetensors_files import SafetensorsFile
from octavo.weights.safetensors_writing import OutgoingTensor, write_safetensors

__all__ = ["FOLDER", "WorkState"]

FOLDER = ".octavo-quantize"
_VERSION = 1


class WorkState:
    """The folder of a run inside the output folder; removed when the output is whole."""

    def __init__(self, out: Path, fingerprint: str) -> None:
        """Begin, or take up a run with the same ``fingerprint`` (of settings, model and text)."""
        self.folder = out / FOLDER
        self._path = self.folder / "state.json"
        self.layers: list[dict[str, Any]] = []
        self._activations: dict[str, str] | None = None
        self._fingerprint = fingerprint
        if self._path.is_file():
            self._take_up()
        elif out.exists() and any(out.iterdir()):
            raise ConfigError(f"{out}: is not empty; give a folder that does not exist yet")
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write()

    def _take_up(self) -> None:
        known = read_json_object(self._path)
        if known.get("version") != _VERSION or known.get("fingerprint") != self._fingerprint:
            raise ConfigError(
                f"{self.folder.parent}: was begun with other settings, another model, text or version of octavo; "
                "give the same again, or remove the folder"
            )
        layers, activations = known.get("layers"), known.get("activations")
        if not isinstance(layers, list) or not all(_is_entry(layer) for layer in layers):
            raise WeightsError(f"{self._path}: is damaged (layers); remove {self.folder.parent} and begin again")
        self.layers = layers
        self._activations = activations if _is_entry(activations) else None
        for entry in [*layers, *([self._activations] if self._activations else [])]:
            self._check(entry)

    def _check(self, entry: Mapping[str, Any]) -> None:
        path = self.folder / Path(str(entry["file"])).name
        if not path.is_file() or _digest(path) != entry["sha256"]:
            raise WeightsError(f"{path}: is missing or damaged; remove {self.folder.parent} and begin again")

    @property
    def finished(self) -> int:
        """How many layers are done."""
        return len(self.layers)

    def finish_layer(
        self, tensors: Mapping[str, WrittenTensor], about: Mapping[str, Any], activations: Mapping[str, Float32Array]
    ) -> None:
        """Keep a layer's tensors and what is known ``about`` it, and the activations the next one starts from."""
        number = len(self.layers)
        path = self.folder / f"layer-{number:04}.safetensors"
        write_safetensors(path, [outgoing(name, tensor) for name, tensor in tensors.items()])
        old = self._activations
        self._activations = None
        if activations:
            after = self.folder / f"after-{number:04}.safetensors"
            arrays = {
                name: WrittenTensor("F32", np.ascontiguousarray(x, np.float32)) for name, x in activations.items()
            }
            write_safetensors(after, [outgoing(name, tensor) for name, tensor in arrays.items()])
            self._activations = {"file": after.name, "sha256": _digest(after)}
        self.layers.append({"file": path.name, "sha256": _digest(path), **about})
        self._write()
        if old is not None:
            (self.folder / old["file"]).unlink(missing_ok=True)

    def activations(self) -> dict[str, Float32Array]:
        """Those the next layer starts from."""
        if self._activations is None:
            return {}
        file = SafetensorsFile(self.folder / self._activations["file"])
        return {name: np.array(file.tensor(name).read_f32()) for name in file.entries}

    def tensors(self) -> Iterable[OutgoingTensor]:
        """The tensors of all finished layers, read when they are written."""
        for layer in self.layers:
            file = SafetensorsFile(self.folder / layer["file"])
            for name, entry in file.entries.items():
                place = slice(file.data_start + entry.start, file.data_start + entry.stop)
                pieces: Callable[[], Iterable[Any]] = partial(_piece, file, place)
                yield OutgoingTensor(name, entry.dtype, entry.shape, pieces)

    def remove(self) -> None:
        """Forget the run: its output is whole."""
        shutil.rmtree(self.folder)

    def _write(self) -> None:
        state = {
            "version": _VERSION,
            "fingerprint": self._fingerprint,
            "layers": self.layers,
            "activations": self._activations,
        }
        draft = self._path.with_name("state.json.partial")
        draft.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        draft.replace(self._path)


def outgoing(name: str, tensor: WrittenTensor) -> OutgoingTensor:
    """A tensor that is in memory."""
    values = np.ascontiguousarray(tensor.values)
    return OutgoingTensor(name, tensor.dtype, tensor.values.shape, lambda: [values.reshape(-1).view(np.uint8)])


def _piece(file: SafetensorsFile, place: slice) -> list[Any]:
    return [file.file.bytes[place]]


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("file"), str) and isinstance(value.get("sha256"), str)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
