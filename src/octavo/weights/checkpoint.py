"""The one way into a model's weights and configuration, whatever the format of its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from octavo.errors import WeightsError
from octavo.weights.built import BuiltCheckpoint, is_built
from octavo.weights.gguf import GgufCheckpoint
from octavo.weights.gguf_split import first_part
from octavo.weights.safetensors_files import SafetensorsCheckpoint
from octavo.weights.tensors import Tensor

__all__ = ["Checkpoint", "open_checkpoint"]


class Checkpoint(Protocol):
    """One opened model. Configuration and tensor names are Hugging Face's, also for a GGUF file."""

    path: Path
    format: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    gguf_metadata: Mapping[str, Any] | None
    notes: tuple[str, ...]  # what a user should know of how its weights are run

    def names(self) -> list[str]:
        """The names of all tensors, in the order of the file."""

    def tensor(self, name: str) -> Tensor:
        """A description of one tensor; its bytes are read when asked for."""

    def close(self) -> None:
        """Let go of the files; tensors already handed out stay readable."""


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model directory (config.json and safetensors, or one .gguf model), a .gguf file or a built model.

    Of a model split over several .gguf files any of them will do.
    """
    location = Path(path)
    if location.is_dir():
        if is_built(location):
            return BuiltCheckpoint(location)
        if not (location / "config.json").is_file():
            found = sorted(location.glob("*.gguf"))
            first = found[0] if len(found) == 1 else first_part(found)
            if first is not None:
                return GgufCheckpoint(first)
            what = f"{len(found)} .gguf files, name one of them" if found else "no .gguf file"
            raise WeightsError(f"{location}: has no config.json and {what}")
        return SafetensorsCheckpoint(location)
    if not location.exists():
        raise WeightsError(f"{location}: no such file or directory")
    if location.suffix.lower() != ".gguf":
        raise WeightsError(f"{location}: is neither a model directory nor a .gguf file")
    return GgufCheckpoint(location)
