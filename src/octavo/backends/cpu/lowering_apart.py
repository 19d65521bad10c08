"""Linears whose weights are stored in different ways: each of its own form, and inputs in the order of a weight's k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo._native import Act, Activation, Elementwise, Epilogue, PackedWeight, Plan
from octavo.backends.cpu.arena import Buffer
from octavo.backends.cpu.forms import WeightForm
from octavo.backends.cpu.packing import stacked_columns
from octavo.models import graph as ir

if TYPE_CHECKING:
    from octavo.backends.cpu.lowering import _Lowering

__all__ = ["ordered_input", "split_linear"]

Float32Array = NDArray[np.float32]
F32_ROWS = (Act.F32, 0, 0)
_ACTIVATIONS = {
    "silu_mul": Elementwise.SiluMul,
    "gelu_mul": Elementwise.GeluMul,
    "gelu_tanh_mul": Elementwise.GeluTanhMul,
    "gelu": Elementwise.Gelu,
    "gelu_tanh": Elementwise.GeluTanh,
    "silu": Elementwise.Silu,
    "relu": Elementwise.Relu,
    "relu2": Elementwise.Relu2,
}


def ordered_input(lowering: _Lowering, value: ir.Value, form: WeightForm, name: str) -> Buffer:
    """The value as a form wants it, its elements in the order of the weight's."""
    if form.order is None:
        return lowering._get(value, form.activation, name)
    key = value, form.activation, form.order
    if key not in lowering.reordered:
        source, width, order = lowering._get(value, F32_ROWS, name), lowering.widths[value], form.order
        target = lowering.reordered[key] = lowering._buffer(form.activation, width)
        lowering._emit(
            (source, target),
            lambda plan, _: plan.add_norm(
                name, source.activation(), width, None, None, 0.0, False, target.activation(), False, order.indices
            ),
        )
    return lowering.reordered[key]


def split_linear(lowering: _Lowering, node: ir.Linear, name: str) -> None:
    """A linear whose weights have no form in common: one product for each, side by side in one value."""
    width = lowering.widths[node.output]
    total = sum(node.out_features)
    # One more row, so that a view of the last columns lies inside as a whole.
    products = Buffer(Act.F32, total, lowering._rows() + 1)
    lowering.buffers.append(products)
    start = 0
    for weight_name, bias_name, form, size in zip(
        node.weights, node.biases, lowering.forms[node.output], node.out_features, strict=True
    ):
        x = ordered_input(lowering, node.x, form, f"{name} input")
        lowering.result.arithmetic[name] = lowering.arithmetic_of(form)
        columns, count = stacked_columns([size])
        weight = lowering._pack((weight_name,), columns, count, lowering._piece(node.x))
        bias = lowering._bias([bias_name], columns, count)

        def add(
            plan: Plan,
            weights: Sequence[PackedWeight],
            x: Buffer = x,
            weight: int = weight,
            bias: Float32Array | None = bias,
            start: int = start,
            size: int = size,
        ) -> None:
            out = _columns_from(products, start)
            plan.add_linear(name, weights[weight], x.activation(), bias, Epilogue.Store, out, size)

        lowering._emit((x, products), add)
        start += size
    if node.activation is None and node.residual is None:
        lowering.held[node.output][F32_ROWS] = products
        return
    out = lowering.held[node.output][F32_ROWS] = lowering._buffer(F32_ROWS, width)
    if node.activation is not None:
        kind = _ACTIVATIONS[node.activation]
        second = width if node.gated else None
        lowering._emit(
            (products, out),
            lambda plan, _: plan.add_elementwise(
                name,
                kind,
                products.activation(),
                None if second is None else _columns_from(products, second),
                width,
                1.0,
                out.activation(),
            ),
        )
    residual = node.residual
    if residual is not None:
        added = lowering._get(residual, F32_ROWS, "residual")
        first = products if node.activation is None else out
        lowering._emit(
            (first, added, out),
            lambda plan, _: plan.add_elementwise(
                name, Elementwise.Add, first.activation(), added.activation(), width, 1.0, out.activation()
            ),
        )


def _columns_from(buffer: Buffer, start: int) -> Activation:
    """The columns of a float32 value from one on; rows stay as far apart as they are."""
    return Activation(buffer.form, buffer.width, buffer.offset + 4 * start)
