"""The checked, printable graph of one model's forward pass, and the builder that families make it with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ModelError
from octavo.models.derived import Derived, Rows, check_views
from octavo.models.nodes import (
    ACTIVATIONS,
    GATE_ACTIVATIONS,
    Activate,
    Activation,
    Add,
    Attention,
    Embedding,
    GateActivation,
    GatherSampled,
    GeluMul,
    LayerNorm,
    Linear,
    Node,
    PositionEmbedding,
    RmsNorm,
    Scale,
    Shape,
    SiluMul,
    SoftCap,
    Value,
)
from octavo.models.rope import QueryScaling, Rope

__all__ = [
    "ACTIVATIONS",
    "GATE_ACTIVATIONS",
    "Activate",
    "Activation",
    "Add",
    "Attention",
    "Embedding",
    "GateActivation",
    "GatherSampled",
    "GeluMul",
    "Graph",
    "GraphBuilder",
    "LayerNorm",
    "Linear",
    "Node",
    "PositionEmbedding",
    "RmsNorm",
    "Scale",
    "Shape",
    "SiluMul",
    "SoftCap",
    "Value",
]


@dataclass(frozen=True)
class Graph:
    """The forward pass of one model, from token ids to `output`, the logits [rows, vocab_size]; nodes in running order.

    `duplicates` maps names a checkpoint may hold in vain (the head of a tied model) to the weight they must equal.
    `derived` are the weights that are views of checkpoint tensors, by the name nodes read them by. `renames` are pairs
    of beginnings of tensor names: what begins with the first may be stored with the second. `buffers` is a regular
    expression of the names of tensors that follow from the configuration, and that old checkpoints store all the same.
    `unused` are beginnings of names of tensors of parts left out on purpose (layers that predict further tokens).
    """

    architecture: str
    nodes: tuple[Node, ...]
    output: Value
    hidden_size: int
    vocab_size: int
    num_layers: int
    max_position: int
    duplicates: Mapping[str, str] = field(default_factory=dict)
    derived: Mapping[str, Derived] = field(default_factory=dict)
    encoder: bool = False
    renames: tuple[tuple[str, str], ...] = ()
    buffers: str | None = None
    unused: tuple[str, ...] = ()

    @property
    def output_width(self) -> int:
        """The width of the output: logits, or an encoder's vectors."""
        return self.hidden_size if self.encoder else self.vocab_size

    def _error(self, message: str) -> ModelError:
        return ModelError(f"graph {self.architecture}: {message}")

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention nodes, in layer order."""
        return tuple(node for node in self.nodes if isinstance(node, Attention))

    @property
    def kv_heads(self) -> int:
        """Key/value heads of every layer."""
        return self.attentions[0].kv_heads

    @property
    def head_dim(self) -> int:
        """Head width of every layer."""
        return self.attentions[0].head_dim

    def widths(self) -> dict[Value, int]:
        """The width of every value; refuses values read before they are assigned, assigned twice, or of wrong width."""
        widths: dict[Value, int] = {}
        for node in self.nodes:
            for value in node.inputs():
                if value not in widths:
                    raise self._error(f"{type(node).__name__} reads %{value} before it is assigned")
            if node.output in widths:
                raise self._error(f"%{node.output} is assigned twice")
            widths[node.output] = node.width(tuple(widths[value] for value in node.inputs()))
        return widths

    def weights(self) -> dict[str, Shape]:
        """Shape of every weight by name; a weight read by several nodes must have one shape."""
        widths = self.widths()
        shapes: dict[str, Shape] = {}
        for node in self.nodes:
            for name, shape in node.weight_shapes(tuple(widths[value] for value in node.inputs())).items():
                if shapes.setdefault(name, shape) != shape:
                    raise self._error(f"weight {name} is read as {shapes[name]} and as {shape}")
        return shapes

    def sources(self) -> dict[str, Shape]:
        """Shape of every tensor the checkpoint must hold, by name: the weights, or what they are views of."""
        shapes: dict[str, Shape] = {}
        for name, shape in self.weights().items():
            view = self.derived.get(name)
            source, stored = (name, shape) if view is None else (view.source, view.shape)
            if shapes.setdefault(source, stored) != stored:
                raise self._error(f"tensor {source} is read as {shapes[source]} and as {stored}")
        return shapes

    def tied_weights(self) -> set[str]:
        """Weights that both the embedding and the head read, the only ones allowed two readers."""
        embedded = {node.weight for node in self.nodes if isinstance(node, Embedding)}
        heads = {node.weights[0] for node in self.nodes if isinstance(node, Linear) and node.output == self.head}
        return embedded & heads

    @property
    def head(self) -> Value:
        """The value of the head's Linear: the output before any elementwise operation on the logits."""
        producers = {node.output: node for node in self.nodes}
        node = producers[self.output]
        while isinstance(node, Scale | SoftCap):
            node = producers[node.x]
        return node.output

    def check(self) -> None:
        """Refuse a graph that is not well formed; each message names the node, value or weight at fault."""
        widths = self.widths()
        self._check_derived(self.weights())
        if widths.get(self.output) != self.output_width:
            raise self._error(f"output %{self.output} has width {widths.get(self.output)}, not {self.output_width}")
        self._check_weights_read_once()
        self._check_values_read(widths)
        self._check_rows()
        layers = [node.layer for node in self.attentions]
        if layers != list(range(self.num_layers)):
            raise self._error(f"attention layers {layers} are not 0 to {self.num_layers - 1} in order")
        if len({(node.kv_heads, node.head_dim) for node in self.attentions}) > 1:
            raise self._error("layers differ in kv heads or head size")

    def _check_derived(self, weights: Mapping[str, Shape]) -> None:
        """Views are read, have the shape their nodes want, and together hold every row of their tensor once."""
        views: dict[str, dict[str, Derived]] = {}
        for name, view in self.derived.items():
            if name not in weights:
                raise self._error(f"nothing reads the derived weight {name}")
            if view.result != weights[name]:
                raise self._error(f"weight {name} is read as {weights[name]}, {view} of {view.shape} is {view.result}")
            if view.source in weights and view.source not in self.derived:
                raise self._error(f"tensor {view.source} is read both itself and as {name}")
            views.setdefault(view.source, {})[name] = view
        for source, parts in views.items():
            check_views(source, parts)

    def _check_weights_read_once(self) -> None:
        tied, seen = self.tied_weights(), set[str]()
        widths = self.widths()
        for node in self.nodes:
            for name in node.weight_shapes(tuple(widths[value] for value in node.inputs())):
                if name in seen and name not in tied:
                    raise self._error(f"weight {name} is read by more than one node")
                seen.add(name)

    def _check_values_read(self, widths: dict[Value, int]) -> None:
        read = {value for node in self.nodes for value in node.inputs()} | {self.output}
        unread = sorted(set(widths) - read)
        if unread:
            raise self._error(f"nothing reads %{unread[0]}")

    def _check_rows(self) -> None:
        """Values have the rows of the step, after GatherSampled only the sampled ones; no node mixes the two kinds.

        A graph without GatherSampled computes the logits of every row.
        """
        gathered: set[Value] = set()
        for node in self.nodes:
            kinds = {value in gathered for value in node.inputs()}
            if len(kinds) > 1:
                raise self._error(f"{type(node).__name__} mixes all rows with sampled rows")
            if isinstance(node, GatherSampled | Attention) and True in kinds:
                raise self._error(f"{type(node).__name__} of rows already gathered")
            if isinstance(node, GatherSampled) or True in kinds:
                gathered.add(node.output)

    def __str__(self) -> str:
        from octavo.models.printing import format_graph

        return format_graph(self)


@dataclass
class GraphBuilder:
    """Builds a graph node by node; each method returns the value it assigns."""

    architecture: str
    vocab_size: int
    hidden_size: int
    nodes: list[Node] = field(default_factory=list)
    _layer: int | None = None
    derived: dict[str, Derived] = field(default_factory=dict)

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Nodes made inside belong to decoder layer `index`."""
        self._layer = index
        try:
            yield
        finally:
            self._layer = None

    def _next(self) -> Value:
        return len(self.nodes) + 1

    def _emit(self, node: Node) -> Value:
        self.nodes.append(node)
        return node.output

    def node(self, kind: type[Node], **fields: Any) -> Value:
        """A node of a part of the vocabulary that has no method here (octavo.models.mixture)."""
        return self._emit(kind(output=self._next(), layer=self._layer, **fields))

    def derive(
        self,
        source: str,
        label: str,
        shape: Shape,
        *,
        part: int | None = None,
        transposed: bool = False,
        rows: Rows | None = None,
        scale: float = 1.0,
        unit_rows: bool = False,
    ) -> str:
        """A weight that is a view of the tensor `source` of `shape` (see Derived); gives the name it is read by."""
        name = f"{source}:{label}"
        if name in self.derived:
            raise ModelError(f"graph {self.architecture}: weight {name} is derived twice")
        self.derived[name] = Derived(source, shape, part, transposed, rows, scale, unit_rows)
        return name

    def embedding(self, weight: str, scale: float = 1.0, width: int | None = None) -> Value:
        return self._emit(
            Embedding(
                output=self._next(),
                weight=weight,
                vocab_size=self.vocab_size,
                hidden_size=self.hidden_size if width is None else width,
                scale=scale,
            )
        )

    def position_embedding(
        self, weight: str, positions: int, offset: int = 0, *, plus: str | None = None, plus_rows: int = 0
    ) -> Value:
        return self._emit(
            PositionEmbedding(
                output=self._next(),
                weight=weight,
                positions=positions,
                features=self.hidden_size,
                offset=offset,
                plus=plus,
                plus_rows=plus_rows,
            )
        )

    def rms_norm(self, x: Value, weight: str, eps: float, *, plus_one: bool = False) -> Value:
        return self._emit(
            RmsNorm(output=self._next(), layer=self._layer, x=x, weight=weight, eps=eps, plus_one=plus_one)
        )

    def layer_norm(self, x: Value, weight: str | None, bias: str | None, eps: float) -> Value:
        return self._emit(LayerNorm(output=self._next(), layer=self._layer, x=x, weight=weight, bias=bias, eps=eps))

    def linear(
        self, x: Value, weight: str, out_features: int, bias: str | None = None, *, precise: bool = False
    ) -> Value:
        return self._emit(
            Linear(
                output=self._next(),
                layer=self._layer,
                x=x,
                weights=(weight,),
                biases=(bias,),
                out_features=(out_features,),
                precise=precise,
            )
        )

    def attention(
        self,
        *qkv: Value,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope | None,
        scale: float | None = None,
        q_norm: str | tuple[str, ...] | None = None,
        k_norm: str | tuple[str, ...] | None = None,
        norm_eps: float = 0.0,
        norm_plus_one: bool = False,
        norm_layer: bool = False,
        wide_norms: bool = False,
        unit_norms: bool = False,
        norm_after_rope: bool = False,
        query_scaling: QueryScaling | None = None,
        sliding_window: int | None = None,
        chunked: bool = False,
        softcap: float | None = None,
        alibi: tuple[float, ...] | None = None,
        clip: float | None = None,
        sinks: str | None = None,
    ) -> Value:
        """Attention over q, k and v, or over one value holding the three side by side."""
        if self._layer is None:
            raise ModelError(f"graph {self.architecture}: attention outside a layer")
        return self._emit(
            Attention(
                output=self._next(),
                layer=self._layer,
                qkv=qkv,
                q_heads=q_heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                scale=1.0 / math.sqrt(head_dim) if scale is None else scale,
                rope=rope,
                q_norm=q_norm,
                k_norm=k_norm,
                norm_eps=norm_eps,
                norm_plus_one=norm_plus_one,
                norm_layer=norm_layer,
                wide_norms=wide_norms,
                unit_norms=unit_norms,
                norm_after_rope=norm_after_rope,
                query_scaling=query_scaling,
                sliding_window=sliding_window,
                chunked=chunked,
                softcap=softcap,
                alibi=alibi,
                clip=clip,
                sinks=sinks,
            )
        )

    def add(self, a: Value, b: Value) -> Value:
        return self._emit(Add(output=self._next(), layer=self._layer, a=a, b=b))

    def silu_mul(self, gate: Value, up: Value) -> Value:
        return self._emit(SiluMul(output=self._next(), layer=self._layer, gate=gate, up=up))

    def gelu_mul(self, gate: Value, up: Value, *, tanh: bool) -> Value:
        return self._emit(GeluMul(output=self._next(), layer=self._layer, gate=gate, up=up, tanh=tanh))

    def activate(self, x: Value, activation: Activation) -> Value:
        return self._emit(Activate(output=self._next(), layer=self._layer, x=x, activation=activation))

    def scale(self, x: Value, factor: float) -> Value:
        return self._emit(Scale(output=self._next(), layer=self._layer, x=x, factor=factor))

    def softcap(self, x: Value, cap: float) -> Value:
        return self._emit(SoftCap(output=self._next(), layer=self._layer, x=x, cap=cap))

    def gather_sampled(self, x: Value) -> Value:
        return self._emit(GatherSampled(output=self._next(), layer=self._layer, x=x))

    def build(
        self,
        output: Value,
        *,
        num_layers: int,
        max_position: int,
        duplicates: Mapping[str, str] | None = None,
        renames: tuple[tuple[str, str], ...] = (),
        buffers: str | None = None,
        encoder: bool = False,
    ) -> Graph:
        """The finished graph, checked."""
        graph = Graph(
            self.architecture,
            tuple(self.nodes),
            output,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            num_layers=num_layers,
            max_position=max_position,
            duplicates=duplicates or {},
            derived=dict(self.derived),
            renames=renames,
            buffers=buffers,
            encoder=encoder,
        )
        graph.check()
        return graph
