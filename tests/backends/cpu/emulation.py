"""The numpy reference run with the weights and activations that a form leaves: rounded, rotated, in groups."""

from __future__ import annotations

from functools import cache
from unittest import mock

import numpy as np

from octavo.backends.cpu.forms import WeightForm, choose_form
from octavo.backends.cpu.lowering import WeightSource
from octavo.models import graph as ir
from octavo.models import reference
from octavo.models.derived import derived_source
from octavo.models.mixture import LatentAttention
from octavo.quantization.rotation import rotate_rows
from octavo.weights.tensors import AffineTensor
from tests.backends.cpu.tensors import Array


class RoundedWeight:
    """A matrix in an affine form: what is multiplied with it is rounded to int8 as the form asks."""

    __array_ufunc__ = None  # so that `array @ weight` comes here

    def __init__(self, form: WeightForm, tensor: AffineTensor) -> None:
        self.form = form
        self.values = tensor.read_f32()

    @property
    def T(self) -> RoundedWeight:
        return self

    def __getitem__(self, rows: Array) -> Array:
        """Rows of an embedding."""
        block = self.form.rotation
        return rotate_rows(self.values[rows], block) if block else self.values[rows]

    def __rmatmul__(self, x: Array) -> Array:
        _, group, rotation = self.form.activation
        rows, k = x.shape
        padded = np.zeros((rows, -(-k // 32) * 32), np.float32)
        padded[:, :k] = x
        if rotation:
            padded = rotate_rows(padded, rotation)
        grouped = padded.reshape(rows, -1, group)
        largest = np.abs(grouped).max(axis=2, keepdims=True)
        codes = np.rint(grouped * np.divide(127, largest, out=np.zeros_like(largest), where=largest > 0))
        rounded = (codes * (largest / 127)).reshape(padded.shape)[:, :k]
        product: Array = rounded @ self.values.T
        return product


def emulated_logits(graph: ir.Graph, source: WeightSource, quantization: str, tokens: list[int]) -> Array:
    """Logits of the weights as `quantization` leaves them, with float32 keys and values."""
    embedded = {node.weight for node in graph.nodes if isinstance(node, ir.Embedding)}
    heads = {
        name
        for node in graph.nodes
        if isinstance(node, ir.Linear) and node.output == graph.head
        for name in node.weights
    }

    positions = {node.weight for node in graph.nodes if isinstance(node, ir.PositionEmbedding)}
    attentions = {node.output: node.piece for node in graph.nodes if isinstance(node, ir.Attention)}
    pieces = {
        name: attentions[node.x]
        for node in graph.nodes
        if isinstance(node, ir.Linear) and node.x in attentions
        for name in node.weights
    }

    # Routers and the products of single heads have the precision of their own that the reference gives them.
    own = {name for node in graph.nodes if isinstance(node, ir.Linear) and node.precise for name in node.weights}
    own |= {node.expansion for node in graph.nodes if isinstance(node, LatentAttention)}
    tensors = derived_source(source, graph.derived)

    @cache
    def weight(name: str) -> Array | RoundedWeight:
        tensor = tensors.tensor(name)
        if quantization == "none" or len(tensor.shape) == 1 or name in positions | own:
            values = tensor.read_f32()
            return bf16(values) if name in embedded else values  # products round their weights themselves
        # The vocabulary is kept in 8 bits where the rest has 4.
        vocabulary = quantization.startswith("w4") and name in embedded | heads
        form, (rounded,) = choose_form([tensor], "w8" if vocabulary else quantization, pieces.get(name, 0))
        assert isinstance(rounded, AffineTensor)
        return RoundedWeight(form, rounded)

    def rounded(x: Array) -> Array:
        return bf16(x) if quantization == "none" else x

    bf16 = reference.round_to_bf16
    with mock.patch.object(reference, "round_to_bf16", rounded):
        return reference.reference_logits(graph, weight, tokens, round_inputs=True)


def relative_error(found: Array, expected: Array) -> float:
    """Root mean square of the difference, over that of the logits."""
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))
