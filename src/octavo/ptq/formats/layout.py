"""What a layout does: the tensors that stand for a quantised linear, and what config.json says about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from octavo.ptq.grid import QuantizedMatrix, ScaleDtype
from octavo.ptq.settings import QuantizeSettings

__all__ = ["Layout", "Stored", "WrittenTensor"]


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor as it goes into a file: ``dtype`` by its safetensors name, the numbers as numpy holds those bits."""

    dtype: str
    values: NDArray[Any]


Stored = Mapping[str, WrittenTensor]


class Layout(Protocol):
    """One way to write quantised linears."""

    scale_dtype: ScaleDtype

    def check(self, name: str, shape: tuple[int, int], group: int) -> None:
        """Refuse a matrix that the layout cannot hold, by name."""

    def pack(self, name: str, matrix: QuantizedMatrix, input_scale: float | None) -> Stored:
        """The tensors of the linear whose weight is called ``name`` (ending in ``.weight``)."""

    def config(self, settings: QuantizeSettings, ignored: Sequence[str]) -> dict[str, Any]:
        """``quantization_config``; ``ignored`` are modules with linears that stay as they are."""

    @property
    def torch_dtype(self) -> str | None:
        """The type the others compute this layout in; None: that of the checkpoint."""


def module_of(name: str) -> str:
    """The module a weight belongs to."""
    return name.removesuffix(".weight")
