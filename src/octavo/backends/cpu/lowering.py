"""From a rewritten graph to the operations of a native plan: forms of weights and activations, buffers, one arena."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo._native import Act, Elementwise, Epilogue, Form, PackedWeight, Plan
from octavo.backends.cpu.arena import Buffer, place
from octavo.backends.cpu.forms import InputOrder, WeightForm, choose_form, shares_form, vocabulary_form
from octavo.backends.cpu.lowering_apart import ordered_input, split_linear
from octavo.backends.cpu.lowering_mixture import (
    ExpertForms,
    choose_expert_forms,
    lower_experts,
    lower_latent_attention,
    lower_route,
)
from octavo.backends.cpu.packing import Packing, interleaved_columns, stacked_columns
from octavo.errors import ModelError
from octavo.kv_cache import KvCacheType
from octavo.models import graph as ir
from octavo.models.derived import TensorSource as WeightSource
from octavo.models.derived import derived_source
from octavo.models.mixture import LatentAttention, MoeExperts, MoeRoute, SigmoidGate
from octavo.models.rope import QueryScaling, Rope
from octavo.weights.built import BuiltRows
from octavo.weights.row_views import shifted_view
from octavo.weights.tensors import Tensor
from octavo.weights.views import dequantized_view

__all__ = ["BLOCK_SIZE", "HEAD_ROWS", "Lowered", "StepShape", "WeightSource", "lower"]

BLOCK_SIZE = 16
# Rows of logits that exist at once; more are computed slice by slice.
HEAD_ROWS = 64
_K_PAD = 32
_MAX_HEAD_DIM = 576  # kMaxHeadDim in native/common.h

Float32Array = NDArray[np.float32]
Requirement = tuple[Act, int, int]  # form of activations, k per scale, block of their rotation

_ARITHMETIC = {Act.I8: "int8", Act.BF16: "bf16", Act.F32: "f32"}
_EPILOGUES = {
    "silu_mul": Epilogue.SiluMul,
    "gelu_mul": Epilogue.GeluMul,
    "gelu_tanh_mul": Epilogue.GeluTanhMul,
    "gelu": Epilogue.Gelu,
    "gelu_tanh": Epilogue.GeluTanh,
    "silu": Epilogue.Silu,
    "relu": Epilogue.Relu,
    "relu2": Epilogue.Relu2,
}
_ACTIVATIONS = {
    "gelu": Elementwise.Gelu,
    "gelu_tanh": Elementwise.GeluTanh,
    "silu": Elementwise.Silu,
    "relu": Elementwise.Relu,
    "relu2": Elementwise.Relu2,
}
# Plain float32 rows; (Act.F32, 32, 0) are rows padded with zeros to a multiple of 32, as products want them.
_F32: Requirement = (Act.F32, 0, 0)


@dataclass(frozen=True)
class StepShape:
    """The largest step: tokens, sequences, and blocks per sequence."""

    max_tokens: int
    max_sequences: int
    max_blocks: int

    @property
    def head_rows(self) -> int:
        return min(HEAD_ROWS, self.max_tokens)


@dataclass
class _Operation:
    """An operation of the plan to be: buffers it touches, and the call that adds it once they are placed."""

    buffers: tuple[Buffer, ...]
    add: Callable[[Plan, Sequence[PackedWeight]], None]


@dataclass
class Lowered:
    """A graph ready to be built: what to pack, the operations, and the arena they need."""

    shape: StepShape
    output_width: int
    kv: KvCacheType
    bidirectional: bool = False
    packings: list[Packing] = field(default_factory=list)
    vectors: dict[str, Float32Array] = field(default_factory=dict)  # norms and biases, as they were read
    rope_tables: list[tuple[Float32Array, Float32Array]] = field(default_factory=list)
    query_factors: list[Float32Array] = field(default_factory=list)
    body: list[_Operation] = field(default_factory=list)
    head: list[_Operation] = field(default_factory=list)
    logits: Buffer | None = None
    arena_bytes: int = 0
    arithmetic: dict[str, str] = field(default_factory=dict)  # of the operations that multiply, by name

    def build(self, level: str, threads: int, weights: Sequence[PackedWeight]) -> Plan:
        """The native plan, still without a KV pool."""
        shape = self.shape
        plan = Plan(
            level,
            threads,
            shape.max_tokens,
            shape.max_sequences,
            shape.max_blocks,
            shape.head_rows,
            self.output_width,
            self.arena_bytes,
        )
        for cos, sin in self.rope_tables:
            plan.add_rope_tables(cos, sin)
        if self.bidirectional:
            plan.set_bidirectional()
        for factors in self.query_factors:
            plan.add_query_factors(factors)
        for operation in self.body:
            operation.add(plan, weights)
        plan.begin_head()
        for operation in self.head:
            operation.add(plan, weights)
        assert self.logits is not None
        plan.set_logits(self.logits.activation())
        return plan


def lower(
    graph: ir.Graph, source: WeightSource, *, quantization: str | None, kv: KvCacheType, shape: StepShape
) -> Lowered:
    """Choose forms, lay out the arena and list the operations; of weights only small vectors are read."""
    return _Lowering(graph, source, quantization, kv, shape).run()


class _Lowering:
    """State of one lowering: the buffers that hold each value, by form."""

    def __init__(
        self, graph: ir.Graph, source: WeightSource, quantization: str | None, kv: KvCacheType, shape: StepShape
    ) -> None:
        self.graph = graph
        self.source = derived_source(source, graph.derived)
        self.quantization = quantization
        self.shape = shape
        self.result = Lowered(shape, graph.output_width, kv, graph.encoder)
        self.widths = graph.widths()
        self.held: dict[ir.Value, dict[Requirement, Buffer]] = defaultdict(dict)
        self.buffers: list[Buffer] = []
        self.in_head = False
        self.gathered: dict[ir.Value, ir.Value] = {}
        self.packed: dict[tuple[str, ...], int] = {}
        self.forms: dict[ir.Value, list[WeightForm]] = {}  # one, or one for each weight
        self.reordered: dict[tuple[ir.Value, Requirement, InputOrder], Buffer] = {}
        self.experts: dict[ir.Value, ExpertForms] = {}
        self.precise = {
            name for node in graph.nodes if isinstance(node, ir.Linear) and node.precise for name in node.weights
        }
        self.last_read = {value: index for index, node in enumerate(graph.nodes) for value in node.inputs()}
        self.tables: dict[Rope, int] = {}
        self.factors: dict[QueryScaling, int] = {}
        self.index = 0
        self.producers = {node.output: node for node in graph.nodes}
        head = self.producers[graph.head]
        self.vocabulary = {node.weight for node in graph.nodes if isinstance(node, ir.Embedding)}
        self.vocabulary.update(head.weights if isinstance(head, ir.Linear) else ())

    def run(self) -> Lowered:
        graph = self.graph
        needs: dict[ir.Value, set[Requirement]] = defaultdict(set)
        for node in graph.nodes:
            if isinstance(node, ir.Linear):
                self.forms[node.output] = self._forms(node)
                needs[node.x].update(_wanted(form) for form in self.forms[node.output])
                if node.residual is not None:
                    needs[node.residual].add(_F32)
            elif isinstance(node, MoeExperts):
                self.experts[node.output] = choose_expert_forms(self, node)
                needs[node.x].add(self.experts[node.output].gate_up.activation)
                for value in node.inputs()[1:]:
                    needs[value].add(_F32)
            else:
                for value in node.inputs():
                    needs[value].add(_F32)
        needs[graph.output].add(_F32)
        self.needs = needs
        for self.index, node in enumerate(graph.nodes):
            self._lower(node)
        if not self.in_head:
            raise ModelError("the CPU back end needs a graph that gathers the sampled rows before its head")
        self.result.logits = self.held[graph.output][_F32]
        # The sampler reads the logits after the last operation. The head runs once per slice of rows, so what it
        # gathers from has to outlive its last operation too.
        end = len(self.result.body) + len(self.result.head)
        self.result.logits.touch(end)
        for value in self.gathered.values():
            self.held[value][_F32].touch(end)
        self.result.arena_bytes = place(self.buffers)
        return self.result

    # Buffers

    def _rows(self) -> int:
        return self.shape.head_rows if self.in_head else self.shape.max_tokens

    def _buffer(self, requirement: Requirement, width: int, rows: int | None = None) -> Buffer:
        form, group, rotation = requirement
        padded = width if requirement == _F32 else -(-width // _K_PAD) * _K_PAD
        buffer = Buffer(form, padded, rows or self._rows(), group or _K_PAD, rotation)
        self.buffers.append(buffer)
        return buffer

    def _emit(self, buffers: Sequence[Buffer], add: Callable[[Plan, Sequence[PackedWeight]], None]) -> None:
        operations = self.result.head if self.in_head else self.result.body
        position = len(self.result.body) + len(self.result.head)
        for buffer in buffers:
            buffer.touch(position)
        operations.append(_Operation(tuple(buffers), add))

    def _get(self, value: ir.Value, requirement: Requirement, name: str) -> Buffer:
        """The value in a form, converted from float32 when it is not held in it, its rows gathered if they have to."""
        forms = self.held[value]
        if requirement not in forms:
            gather = _F32 not in forms and value in self.gathered
            source, width = self.held[self.gathered[value] if gather else value][_F32], self.widths[value]
            name = "gather" if gather else name
            # A gather pads its rows also in float32.
            target = self._buffer(requirement, -(-width // _K_PAD) * _K_PAD if gather else width)
            self._emit(
                (source, target),
                lambda plan, _: plan.add_norm(
                    name, source.activation(), width, None, None, 0.0, False, target.activation(), gather
                ),
            )
            forms[requirement] = target
        return forms[requirement]

    # Weights

    def _vector(self, name: str) -> Float32Array:
        vectors = self.result.vectors
        if name not in vectors:
            vectors[name] = np.ascontiguousarray(self.source.tensor(name).read_f32(), np.float32)
        return vectors[name]

    def _tensors(self, names: Sequence[str]) -> list[Tensor]:
        return [self.source.tensor(name) for name in names]

    def _choose(self, names: Sequence[str], piece: int = 0) -> tuple[WeightForm, list[Tensor]]:
        """The form of a weight. w4 keeps the embedding and the head in w8, as GGUF files do: at 4 bits they alone cost
        twenty times what all layers do (mean KL 6.2e-2 against 3e-3 on SmolLM2)."""
        if not self.precise.isdisjoint(names):
            return choose_form(self._tensors(names), "f32")
        inside = self.vocabulary.isdisjoint(names)
        return choose_form(
            self._tensors(names), self.quantization if inside else vocabulary_form(self.quantization), piece
        )

    def _forms(self, node: ir.Linear) -> list[WeightForm]:
        """The form of a linear; of each weight when none holds them all (one quantised and the other not, say)."""
        piece = self._piece(node.x)
        if shares_form(self._tensors(node.weights), self.quantization, piece):
            return [self._choose(node.weights, piece)[0]]
        return [self._choose((name,), piece)[0] for name in node.weights]

    def _piece(self, value: ir.Value) -> int:
        """What an operation writes of a row at once, if it is not all: attention works head by head."""
        producer = self.producers.get(value)
        return producer.piece if isinstance(producer, ir.Attention) else 0

    def _pack(self, names: tuple[str, ...], columns: Sequence[NDArray[np.int32]], count: int, piece: int = 0) -> int:
        """Index of the packed weight; the tied embedding and head share one."""
        if names not in self.packed:
            form, tensors = self._choose(names, piece)
            self.packed[names] = self._add_packing(Packing(tuple(tensors), form, tuple(columns), count))
        return self.packed[names]

    def _add_packing(self, packing: Packing) -> int:
        self.result.packings.append(packing)
        return len(self.result.packings) - 1

    @property
    def query_form(self) -> Act:
        """What attention multiplies: queries have the form of the cache."""
        return Act.F32 if self.result.kv.float32 else Act.BF16

    def arithmetic_of(self, form: WeightForm) -> str:
        """The type that products with weights of a form are computed in, as profiles name it."""
        return _ARITHMETIC[form.activation[0]]

    def arithmetic_name(self, act: Act) -> str:
        return _ARITHMETIC[act]

    # Nodes

    def _lower(self, node: ir.Node) -> None:
        match node:
            case ir.Embedding():
                self._embedding(node)
            case ir.PositionEmbedding():
                self._position_embedding(node)
            case ir.RmsNorm() | ir.LayerNorm():
                self._norm(node)
            case ir.Linear():
                self._linear(node)
            case LatentAttention():
                lower_latent_attention(self, node)
            case ir.Attention():
                self._attention(node)
            case MoeRoute():
                lower_route(self, node)
            case MoeExperts():
                lower_experts(self, node)
            case SigmoidGate():
                self._elementwise(node, "sigmoid_gate", Elementwise.SigmoidGate, node.x, node.gate)
            case ir.GatherSampled():
                self.in_head = True
                self.gathered[node.output] = node.x
            case ir.Add():
                self._elementwise(node, "add", Elementwise.Add, node.a, node.b)
            case ir.SiluMul():
                self._elementwise(node, "silu_mul", Elementwise.SiluMul, node.gate, node.up)
            case ir.GeluMul():
                kind = Elementwise.GeluTanhMul if node.tanh else Elementwise.GeluMul
                self._elementwise(node, "gelu_mul", kind, node.gate, node.up)
            case ir.Activate():
                self._elementwise(node, node.activation, _ACTIVATIONS[node.activation], node.x)
            case ir.Scale():
                self._elementwise(node, "scale", Elementwise.Scale, node.x, scalar=node.factor)
            case ir.SoftCap():
                self._elementwise(node, "softcap", Elementwise.Softcap, node.x, scalar=node.cap)
            case _:
                raise ModelError(f"the CPU back end has no operation {type(node).__name__}")

    def _embedding(self, node: ir.Embedding) -> None:
        columns, count = stacked_columns([node.vocab_size])
        weight = self._pack((node.weight,), columns, count)
        out = self.held[node.output][_F32] = self._buffer(_F32, node.hidden_size)
        self._emit(
            (out,), lambda plan, weights: plan.add_embed("embedding", weights[weight], out.activation(), node.scale)
        )

    def _position_embedding(self, node: ir.PositionEmbedding) -> None:
        """Positions stay in float32: the table is small, and every value behind it is built on what it adds."""
        tensor = self.source.tensor(node.weight)
        if node.plus is not None:
            added = self._vector(node.plus)[0]
            if not isinstance(tensor.reader, BuiltRows):  # in which it has been added
                tensor = shifted_view(dequantized_view(tensor), added)
        # Whole blocks, so that no position of a block table lies outside; those past the model's own are zeros.
        count = node.offset + -(-(node.positions - node.offset) // BLOCK_SIZE) * BLOCK_SIZE
        columns, _ = stacked_columns([node.positions])
        weight = len(self.result.packings)
        self.result.packings.append(Packing((tensor,), WeightForm(Form.F32), tuple(columns), count))
        out = self.held[node.output][_F32] = self._buffer(_F32, node.features)
        self._emit(
            (out,),
            lambda plan, weights: plan.add_embed(
                "position embedding", weights[weight], out.activation(), 1.0, True, node.offset
            ),
        )

    def _norm(self, node: ir.RmsNorm | ir.LayerNorm) -> None:
        value = self.gathered.get(node.x, node.x)
        source, width = self.held[value][_F32], self.widths[node.x]
        # A norm without weights multiplies by 1.
        scale = np.ones(width, np.float32) if node.weight is None else self._vector(node.weight)
        if isinstance(node, ir.RmsNorm) and node.plus_one:
            scale = scale + np.float32(1.0)
        bias = self._vector(node.bias) if isinstance(node, ir.LayerNorm) and node.bias is not None else None
        layer, gather = isinstance(node, ir.LayerNorm), node.x in self.gathered
        name = "head norm" if gather else "norm"

        def norm_into(target: Buffer) -> None:
            self._emit(
                (source, target),
                lambda plan, _: plan.add_norm(
                    name, source.activation(), width, scale, bias, node.eps, layer, target.activation(), gather
                ),
            )

        for requirement in sorted(self.needs[node.output], key=str):
            # A norm pads its rows also in float32.
            target = self._buffer(requirement, -(-width // _K_PAD) * _K_PAD)
            self.held[node.output][requirement] = target
            norm_into(target)

    def _linear(self, node: ir.Linear) -> None:
        if len(self.forms[node.output]) > 1:
            split_linear(self, node, _linear_name(node))
            return
        form, name = self.forms[node.output][0], _linear_name(node)
        x = ordered_input(self, node.x, form, f"{name} input")
        self.result.arithmetic[name] = self.arithmetic_of(form)
        if node.gated:
            columns, count = interleaved_columns(node.out_features[0])
        else:
            columns, count = stacked_columns(node.out_features)
        weight = self._pack(node.weights, columns, count, self._piece(node.x))
        bias = self._bias(node.biases, columns, count)
        width = self.widths[node.output]
        needed = self.needs[node.output]
        if node.residual is not None and node.activation is not None:
            raise ModelError("the CPU back end adds no residual to the output of an activation")
        if node.residual is not None:
            epilogue, out = Epilogue.Add, self._residual(node.residual)
            self.held[node.output][_F32] = out
        else:
            epilogue = Epilogue.Store if node.activation is None else _EPILOGUES[node.activation]
            requirement = next(iter(needed)) if len(needed) == 1 and node.activation is not None else _F32
            out = self.held[node.output][requirement] = self._buffer(requirement, width)
            if requirement != _F32:
                width = out.width  # the padding too: packed columns past the real ones give zeros
        self._emit(
            (x, out),
            lambda plan, weights: plan.add_linear(
                name, weights[weight], x.activation(), bias, epilogue, out.activation(), width
            ),
        )

    def _bias(
        self, names: Sequence[str | None], columns: Sequence[NDArray[np.int32]], count: int
    ) -> Float32Array | None:
        """Biases at the packed columns of their weights."""
        if all(name is None for name in names):
            return None
        bias = np.zeros(count, np.float32)
        for name, places in zip(names, columns, strict=True):
            if name is not None:
                bias[places] = self._vector(name)
        return bias

    def _residual(self, value: ir.Value) -> Buffer:
        """A buffer with the residual to add to: its own when nothing reads it later, else a copy."""
        source = self._get(value, _F32, "residual")
        if self.last_read[value] == self.index and value != self.graph.output:
            return source
        copy, width = self._buffer(_F32, self.widths[value]), self.widths[value]
        self._emit(
            (source, copy),
            lambda plan, _: plan.add_elementwise(
                "copy", Elementwise.Scale, source.activation(), None, width, 1.0, copy.activation()
            ),
        )
        return copy

    def _attention(self, node: ir.Attention) -> None:
        if len(node.qkv) != 1:
            raise ModelError("the CPU back end needs q, k and v merged in one value")
        if node.head_dim % BLOCK_SIZE or node.head_dim > _MAX_HEAD_DIM:
            raise ModelError(
                f"the CPU back end needs heads of a multiple of {BLOCK_SIZE} up to {_MAX_HEAD_DIM}; "
                f"this model's head_dim is {node.head_dim}"
            )
        if self.result.kv.bits == 4 and node.head_dim % _K_PAD:
            raise ModelError(
                f"a KV cache of {self.result.kv.name} needs heads of a multiple of {_K_PAD}; "
                f"this model's head_dim is {node.head_dim}: use int8"
            )
        qkv = self._get(node.qkv[0], _F32, "attention input")
        kind: Requirement = (self.query_form, 32, 0)
        self.result.arithmetic["attention"] = _ARITHMETIC[kind[0]]
        q = self._buffer(kind, node.q_heads * node.head_dim)
        q.width = node.q_heads * node.head_dim
        # Written in the form that its only reader wants, where groups of that form do not reach across heads.
        needed = self.needs[node.output]
        direct = len(needed) == 1 and node.head_dim % _K_PAD == 0
        requirement = next(iter(needed)) if direct else _F32
        out = self.held[node.output][requirement] = self._buffer(requirement, node.q_heads * node.head_dim)
        q_norm, k_norm = self._head_norm(node, node.q_norm), self._head_norm(node, node.k_norm)
        factors = -1 if node.query_scaling is None else self._query_factors(node.query_scaling)
        if node.clip is not None:
            self._emit((qkv,), lambda plan, _: _add_clip(plan, qkv, sum(node.qkv_widths()), node.clip or 0.0))
        slopes = None if node.alibi is None else np.asarray(node.alibi, np.float32)
        # The native softmax is one of powers of two.
        sinks = None if node.sinks is None else self._vector(node.sinks) * np.float32(math.log2(math.e))
        layer, heads = node.layer, (node.q_heads, node.kv_heads, node.head_dim)
        dim = 0 if node.rope is None else node.rope.dim
        tables = -1 if node.rope is None else self._tables(node.rope)
        self._emit(
            (qkv, q),
            lambda plan, _: plan.add_rope(
                "rope and append",
                qkv.activation(),
                layer,
                *heads,
                dim,
                tables,
                q_norm,
                k_norm,
                node.norm_eps,
                q.activation(),
                node.norm_layer,
                node.wide_norms,
                node.norm_after_rope,
                factors,
            ),
        )
        self._emit(
            (q, out),
            lambda plan, _: plan.add_attention(
                "attention",
                q.activation(),
                layer,
                *heads,
                node.scale,
                node.softcap or 0.0,
                node.sliding_window or 0,
                out.activation(),
                slopes,
                node.chunked,
                sinks,
            ),
        )

    def _head_norm(self, node: ir.Attention, names: str | tuple[str, ...] | None) -> Float32Array | None:
        """What normed queries or keys are multiplied with, the same for all heads or head by head; None: not normed."""
        if node.unit_norms:
            return np.ones(node.head_dim, np.float32)
        if names is None:
            return None
        weights = [self._vector(name) for name in ((names,) if isinstance(names, str) else names)]
        return np.concatenate(weights) + np.float32(1.0 if node.norm_plus_one else 0.0)

    def _query_factors(self, scaling: QueryScaling) -> int:
        """The number the plan will know the factors of queries by; layers share them."""
        if scaling not in self.factors:
            self.factors[scaling] = len(self.result.query_factors)
            self.result.query_factors.append(scaling.factors(self.shape.max_blocks * BLOCK_SIZE))
        return self.factors[scaling]

    def _tables(self, rope: Rope) -> int:
        """The number the plan will know the cosines and sines by; layers share them."""
        if rope not in self.tables:
            cos, sin = rope.tables(self.shape.max_blocks * BLOCK_SIZE)
            self.tables[rope] = len(self.result.rope_tables)
            self.result.rope_tables.append(
                (np.ascontiguousarray(cos).reshape(-1), np.ascontiguousarray(sin).reshape(-1))
            )
        return self.tables[rope]

    def _elementwise(
        self, node: ir.Node, name: str, kind: Elementwise, a: ir.Value, b: ir.Value | None = None, scalar: float = 1.0
    ) -> None:
        first = self._get(a, _F32, name)
        second = None if b is None else self._get(b, _F32, name)
        width = self.widths[node.output]
        out = self.held[node.output][_F32] = self._buffer(_F32, width)
        self._emit(
            (first, out) if second is None else (first, second, out),
            lambda plan, _: plan.add_elementwise(
                name,
                kind,
                first.activation(),
                None if second is None else second.activation(),
                width,
                scalar,
                out.activation(),
            ),
        )


def _add_clip(plan: Plan, values: Buffer, width: int, limit: float) -> None:
    """Clip in place: attention is the only reader of its queries, keys and values."""
    where = values.activation()
    plan.add_elementwise("clip", Elementwise.Clip, where, None, width, limit, where)


def _wanted(form: WeightForm) -> Requirement:
    """What a linear of a form reads: reordering starts from float32."""
    return form.activation if form.order is None else _F32


def _linear_name(node: ir.Linear) -> str:
    """What the profile calls it: the weights' own short names, the same in every layer."""
    if node.layer is None:
        return "head"
    short = []
    for name in node.weights:
        source, _, label = name.partition(":")
        own = source.removesuffix(".weight").rsplit(".", 1)[-1].removesuffix("_proj")
        short.append(label if label and len(node.weights) > 1 else own)
    return ", ".join(short)
