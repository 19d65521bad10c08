"""One module for each method of quantising checkpoints: how its stored tensors make weights; see weights/quantized.py.

A module has NAMES, what `quant_method` calls it, and read(settings, stored) -> dict[str, QuantizedWeight].
"""
