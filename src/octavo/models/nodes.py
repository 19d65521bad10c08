"""The graph vocabulary: the operations an architecture is described with.

Every value is a float32 matrix [tokens, width] named by an integer assigned once. Shapes of weights are not stored:
each node derives them from the widths of its inputs, so they cannot disagree with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from octavo.errors import ModelError
from octavo.models.rope import QueryScaling, Rope

Value = int
Shape = tuple[int, ...]
Activation = Literal["gelu", "gelu_tanh", "silu", "relu", "relu2"]
GateActivation = Literal["silu_mul", "gelu_mul", "gelu_tanh_mul"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
GATE_ACTIVATIONS: tuple[str, ...] = get_args(GateActivation)


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operation, assigning `output`; `layer` is the decoder layer it belongs to, for printing and splitting."""

    output: Value
    layer: int | None = None

    def inputs(self) -> tuple[Value, ...]:
        """The values read, in a fixed order."""
        raise NotImplementedError

    def width(self, widths: tuple[int, ...]) -> int:
        """The width of the output given the widths of the inputs; refuses impossible ones."""
        raise NotImplementedError

    def weight_shapes(self, widths: tuple[int, ...]) -> dict[str, Shape]:
        """Shapes of the weights read."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Embedding(Node):
    """Rows of `weight` [vocab, hidden] picked by the token ids of the step, times `scale`."""

    weight: str
    vocab_size: int
    hidden_size: int
    scale: float = 1.0

    def inputs(self) -> tuple[Value, ...]:
        return ()

    def width(self, widths: tuple[int, ...]) -> int:
        return self.hidden_size

    def weight_shapes(self, widths: tuple[int, ...]) -> dict[str, Shape]:
        return {self.weight: (self.vocab_size, self.hidden_size)}


@dataclass(frozen=True, kw_only=True)
class PositionEmbedding(Node):
    """Rows of `weight` [positions, width] picked by the position of each token plus `offset`.

    Row 0 of `plus` [plus_rows, width] is added to each: the type of the tokens of a single text, in BERT.
    """

    weight: str
    positions: int
    features: int
    offset: int = 0
    plus: str | None = None
    plus_rows: int = 0

    def inputs(self) -> tuple[Value, ...]:
        return ()

    def width(self, widths: tuple[int, ...]) -> int:
        return self.features

    def weight_shapes(self, widths: tuple[int, ...]) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {self.weight: (self.positions, self.features)}
        if self.plus is not None:
            shapes[self.plus] = (self.plus_rows, self.features)
        return shapes


@dataclass(frozen=True, kw_only=True)
class RmsNorm(Node):
    """x / sqrt(mean(x²) + eps) · weight, or · (1 + weight) with `plus_one`."""

    x: Value
    weight: str
    eps: float
    plus_one: bool = False

    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def width(self, widths: tuple[int, ...]) -> int:
        return widths[0]

    def weight_shapes(self, widths: tuple[int, ...]) -> dict[str, Shape]:
        return {self.weight: (widths[0],)}


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Node):
    """(x - mean) / sqrt(variance + eps) · weight + bias, either of which may be left out (OLMo has neither)."""

    x: Value
    weight: str | None
    bias: str | None
    eps: float

    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def width(self, widths: tuple[int, ...]) -> int:
        return widths[0]

    def weight_shapes(self, widths: tuple[int, ...]) -> dict[str, Shape]:
        return {name: (widths[0],) for name in (self.weight, self.bias) if name is not None}


@dataclass(frozen=True, kw_only=True)
class Linear(Node):
    """x · Wᵀ + bias for one or several weights [out, in] side by side in the output, and an activation of it.

    With the activation of a gate there are two weights, gate and up, and the output is act(gate) · up. `residual` is
    added last. `precise` asks for float32 weights and products whatever form others have: for routers, whose choices
    must not move.
    """

    x: Value
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]
    out_features: tuple[int, ...]
    activation: Activation | GateActivation | None = None
    residual: Value | None = None
    precise: bool = False

    @property
    def gated(self) -> bool:
        """Whether the weights are a gate and what it is multiplied with."""
        return self.activation in GATE_ACTIVATIONS

    def inputs(self) -> tuple[Value, ...]:
        return (self.x,) if self.residual is None else (self.x, self.residual)

    def width(self, widths: tuple[int, ...]) -> int:
        if not len(self.weights) == len(self.biases) == len(self.out_features) > 0:
            raise ModelError(f"linear {self.weights}: weights, biases and out_features must be as many and not empty")
        if self.activation not in (None, *ACTIVATIONS, *GATE_ACTIVATIONS):
            raise ModelError(
                f"linear {self.weights}: activation {self.activation!r} is not one of "
                f"{(*ACTIVATIONS, *GATE_ACTIVATIONS)}"
            )
        if not self.gated:
            result = sum(self.out_features)
        else:
            if len(self.out_features) != 2 or self.out_features[0] != self.out_features[1]:
                raise ModelError(
                    f"linear {self.weights}: {self.activation} needs gate and up of one width, not {self.out_features}"
                )
            result = self.out_features[0]
        if self.residual is not None and widths[1] != result:
            raise ModelError(
                f"linear {self.weights}: residual of width {widths[1]} added to an output of width {result}"
            )
        return result

    def weight_shapes(self, widths: tuple[int, ...]) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for weight, bias, out in zip(self.weights, self.biases, self.out_features, strict=True):
            shapes[weight] = (out, widths[0])
            if bias is not None:
                shapes[bias] = (out,)
        return shapes


@dataclass(frozen=True, kw_only=True)
class Attention(Node):
    """Causal attention over the cached keys and values of `layer`, appending this step's own first.

    `qkv` is the three values (q, k, v), or one value holding q, k and v side by side, first clipped to ±`clip`. Per
    head: RMS norm, or layer norm with `norm_layer`, with `q_norm` and `k_norm` [head_dim] (a tuple of names gives each
    head its own), then rope (or rope first with `norm_after_rope`), then scores · `scale`. With `wide_norms` one norm
    spans all heads of q, and one all of k; `unit_norms` are norms of heads without weights. A window of W sees W
    positions, its own the last; with `chunked`, those of its own chunk of W that are not after it. With `alibi`, a
    slope for each query head, a score falls by the slope for every position between (arXiv 2108.12409). `sinks`
    [q_heads] take part in the softmax of each head as one more score, which has no value.
    """

    layer: int
    qkv: tuple[Value, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    q_norm: str | tuple[str, ...] | None = None
    k_norm: str | tuple[str, ...] | None = None
    norm_eps: float = 0.0
    norm_plus_one: bool = False
    norm_layer: bool = False
    wide_norms: bool = False
    unit_norms: bool = False
    norm_after_rope: bool = False
    query_scaling: QueryScaling | None = None
    sliding_window: int | None = None
    chunked: bool = False
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None
    clip: float | None = None
    sinks: str | None = None

    def inputs(self) -> tuple[Value, ...]:
        return self.qkv

    @property
    def piece(self) -> int:
        """How much of a row of the output is made at once: that of one head."""
        return self.head_dim

    def qkv_widths(self) -> tuple[int, int, int]:
        """Widths of q, k and v."""
        return self.q_heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim

    def width(self, widths: tuple[int, ...]) -> int:
        expected = self.qkv_widths()
        if widths not in (expected, (sum(expected),)):
            raise ModelError(f"attention of layer {self.layer}: q, k, v of widths {expected} needed, not {widths}")
        if self.q_heads % self.kv_heads:
            raise ModelError(
                f"attention of layer {self.layer}: {self.q_heads} query heads cannot share {self.kv_heads} kv heads"
            )
        if self.rope is not None and (self.rope.dim % 2 or not 0 < self.rope.dim <= self.head_dim):
            raise ModelError(
                f"attention of layer {self.layer}: rope over {self.rope.dim} of {self.head_dim} elements of a head"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ModelError(f"attention of layer {self.layer}: sliding window {self.sliding_window} is below 1")
        if self.alibi is not None and (len(self.alibi) != self.q_heads or self.softcap is not None):
            raise ModelError(
                f"attention of layer {self.layer}: {len(self.alibi)} ALiBi slopes for {self.q_heads} query heads"
                + (" under a soft cap" if self.softcap is not None else "")
            )
        if self.chunked and self.sliding_window is None:
            raise ModelError(f"attention of layer {self.layer}: chunks without a size")
        self._check_norms()
        return expected[0]

    def _check_norms(self) -> None:
        weighted = self.q_norm is not None or self.k_norm is not None
        for norm, heads in ((self.q_norm, self.q_heads), (self.k_norm, self.kv_heads)):
            if isinstance(norm, tuple) and (len(norm) != heads or self.wide_norms):
                raise ModelError(f"attention of layer {self.layer}: {len(norm)} norms for {heads} heads")
        if self.unit_norms and weighted:
            raise ModelError(f"attention of layer {self.layer}: norms with and without weights at once")
        if (self.wide_norms or self.norm_layer) and (self.norm_after_rope or self.unit_norms):
            raise ModelError(
                f"attention of layer {self.layer}: only RMS norms of heads come after rope or have no weights"
            )
        if self.wide_norms and self.norm_layer:
            raise ModelError(f"attention of layer {self.layer}: no layer norm over all heads")

    def norm_names(self) -> tuple[str, ...]:
        """The weights of the norms of queries, then those of keys."""
        return (*_names(self.q_norm), *_names(self.k_norm))

    def weight_shapes(self, widths: tuple[int, ...]) -> dict[str, Shape]:
        q_width, k_width, _ = self.qkv_widths() if self.wide_norms else (self.head_dim,) * 3
        named = ((self.q_norm, q_width), (self.k_norm, k_width), (self.sinks, self.q_heads))
        return {name: (width,) for norm, width in named for name in _names(norm)}


@dataclass(frozen=True, kw_only=True)
class Add(Node):
    """a + b."""

    a: Value
    b: Value

    def inputs(self) -> tuple[Value, ...]:
        return (self.a, self.b)

    def width(self, widths: tuple[int, ...]) -> int:
        return _same(self, widths)


@dataclass(frozen=True, kw_only=True)
class SiluMul(Node):
    """silu(gate) · up."""

    gate: Value
    up: Value

    def inputs(self) -> tuple[Value, ...]:
        return (self.gate, self.up)

    def width(self, widths: tuple[int, ...]) -> int:
        return _same(self, widths)


@dataclass(frozen=True, kw_only=True)
class GeluMul(Node):
    """gelu(gate) · up; `tanh` selects the tanh approximation."""

    gate: Value
    up: Value
    tanh: bool

    def inputs(self) -> tuple[Value, ...]:
        return (self.gate, self.up)

    def width(self, widths: tuple[int, ...]) -> int:
        return _same(self, widths)


@dataclass(frozen=True, kw_only=True)
class Activate(Node):
    """An activation of x: gelu, gelu_tanh (its tanh approximation), silu, relu, or relu2, relu(x)²."""

    x: Value
    activation: Activation

    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def width(self, widths: tuple[int, ...]) -> int:
        return widths[0]


@dataclass(frozen=True, kw_only=True)
class Scale(Node):
    """x · factor."""

    x: Value
    factor: float

    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def width(self, widths: tuple[int, ...]) -> int:
        return widths[0]


@dataclass(frozen=True, kw_only=True)
class SoftCap(Node):
    """cap · tanh(x / cap)."""

    x: Value
    cap: float

    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def width(self, widths: tuple[int, ...]) -> int:
        return widths[0]


@dataclass(frozen=True, kw_only=True)
class GatherSampled(Node):
    """The rows of x whose logits somebody reads this step."""

    x: Value

    def inputs(self) -> tuple[Value, ...]:
        return (self.x,)

    def width(self, widths: tuple[int, ...]) -> int:
        return widths[0]


def _names(norm: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if norm is None else (norm,) if isinstance(norm, str) else norm


def _same(node: Node, widths: tuple[int, ...]) -> int:
    if len(set(widths)) != 1:
        raise ModelError(f"{type(node).__name__} of value %{node.output}: operands of different widths {widths}")
    return widths[0]
