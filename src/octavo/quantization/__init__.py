"""Weight schemes: rounding to w8 and w4 as a model is loaded, and the dense view of what is quantised."""

from octavo.quantization.rows import quantize_rows
from octavo.quantization.views import dequantized_view, quantized_view

__all__ = ["dequantized_view", "quantize_rows", "quantized_view"]
