"""Tensors seen in another form than they are stored in: rounded to w8 or w4, or dequantised, as their rows are read."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ModelError
from octavo.quantization.rows import W8_ZERO, Bits, quantize_rows
from octavo.weights.tensors import AffineRows, AffineTensor, DenseTensor, StoredRows, Tensor, Uint8Array
from octavo.weights.views import dequantized_view

__all__ = ["QuantizedRows", "dequantized_view", "quantized_view"]

GROUP = 32


@dataclass(frozen=True)
class QuantizedRows:
    """The rows of a tensor, rounded to groups of small integers when they are read."""

    tensor: Tensor
    bits: Bits
    group: int

    def affine_rows(self, start: int, stop: int) -> AffineRows:
        return quantize_rows(self.tensor.read_f32(start, stop), self.bits, self.group, self.tensor.name)

    def block_rows(self, start: int, stop: int) -> Uint8Array | None:
        return None

    def stored_rows(self) -> StoredRows | None:
        # The native library rounds dense rows itself.
        return self.tensor.stored_rows() if isinstance(self.tensor, DenseTensor) else None

    def release(self) -> None:
        self.tensor.release()


@dataclass(frozen=True)
class WidenedRows:
    """The rows of a 4-bit tensor for those who want 8 bits: the same codes, so that nothing is lost a second time."""

    tensor: AffineTensor

    def affine_rows(self, start: int, stop: int) -> AffineRows:
        return self.tensor.read(start, stop)

    def block_rows(self, start: int, stop: int) -> Uint8Array | None:
        return None

    def release(self) -> None:
        self.tensor.release()


def quantized_view(tensor: Tensor, bits: Bits, group: int = GROUP) -> AffineTensor:
    """The matrix as w8 (``bits`` 8) or w4 (4), in groups of ``group`` where k allows it, else of half, down to 16.

    A tensor that is quantised already is not rounded again unless it has to be: with as many bits it is returned as it
    is, with fewer its codes are widened.
    """
    if len(tensor.shape) != 2:
        raise ModelError(f"tensor {tensor.name}: has shape {list(tensor.shape)}, only matrices can be quantised")
    rows, k = tensor.shape
    if isinstance(tensor, AffineTensor):
        if tensor.bits == bits:
            return tensor
        if tensor.bits < bits:
            return AffineTensor(
                tensor.name,
                tensor.shape,
                bits,
                tensor.group,
                tensor.zero,
                tensor.has_minimum,
                tensor.scale_dtype,
                f"{tensor.source} widened",
                tensor.exact,
                WidenedRows(tensor),
                tensor.order,
            )
    while k % group and group > GROUP // 2:
        group //= 2
    group = group if k % group == 0 else k
    zero, has_minimum = (W8_ZERO, False) if bits == 8 else (0, True)
    reader = QuantizedRows(tensor, bits, group)
    return AffineTensor(tensor.name, (rows, k), bits, group, zero, has_minimum, "f16", f"w{bits}", False, reader)
