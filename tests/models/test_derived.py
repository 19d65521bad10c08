"""Derived weights are the parts they say of their tensors, cover them exactly once, and run as any others do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.backends.cpu import CpuBackend
from octavo.backends.cpu.lowering import StepShape, lower
from octavo.backends.cpu.packing import pack_all
from octavo.errors import ModelError, WeightsError
from octavo.kv_cache import kv_cache_type
from octavo.models.derived import Derived, Rows, check_views, derived_source, rotated_pairs
from octavo.models.graph import Graph, GraphBuilder
from octavo.models.reference import reference_logits
from octavo.models.registry import check_weights
from octavo.models.rewrites import optimize
from octavo.models.rope import Rope
from tests.backends.cpu.tensors import Q4_1, Source, dense
from tests.models.test_registry import MemoryCheckpoint

HEADS, DIM, HIDDEN, VOCAB = 2, 16, 32, 20


@pytest.mark.parametrize(
    ("rows", "of", "expected", "text"),
    [
        (Rows(range(2, 5)), 6, [2, 3, 4], "2 to 4"),
        (Rows(range(1, 2), 3), 6, [1, 4], "1 of every 3"),
        (Rows(range(0, 2), 3), 6, [0, 1, 3, 4], "0 to 1 of every 3"),
        (Rows((1, 0), 2), 4, [1, 0, 3, 2], "1, 0 of every 2"),
        (rotated_pairs(4), 8, [0, 2, 1, 3, 4, 6, 5, 7], "0, 2, 1, 3 of every 4"),
        (rotated_pairs(6, 4), 6, [0, 2, 1, 3, 4, 5], "0, 2, 1, 3, 4, 5 of every 6"),
        (Rows(tuple(range(7, -1, -1))), 8, list(range(7, -1, -1)), "7, 6, 5, 4, 3, 2, ... (8)"),
    ],
)
def test_rows_are_picked_of_every_period(rows: Rows, of: int, expected: list[int], text: str) -> None:
    assert rows.order(of).tolist() == expected
    assert str(rows) == text


@pytest.mark.parametrize(("rows", "of"), [(Rows(range(0, 3)), 2), (Rows((0,), 4), 6), (Rows(()), 4), (Rows((-1,)), 4)])
def test_rows_that_are_not_there_are_refused(rows: Rows, of: int) -> None:
    with pytest.raises(ModelError, match=f"cannot be picked of {of}"):
        rows.order(of)


VIEWS = [
    Derived("t", (6, 8), rows=Rows((5, 0, 2))),
    Derived("t", (6, 8), transposed=True),
    Derived("t", (6, 8), transposed=True, rows=Rows(range(0, 1), 2)),
    Derived("t", (3, 4, 8), part=2),
    Derived("t", (3, 4, 8), part=1, transposed=True, rows=Rows((7, 0))),
    Derived("t", (3, 4, 8), part=0, rows=Rows(range(1, 3)), scale=0.5),
    Derived("t", (5, 4), part=3),
    Derived("t", (8,), rows=Rows(range(1, 2), 2)),
]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_tensor_and_array_are_the_same_part(view: Derived, dtype: str) -> None:
    values = np.arange(np.prod(view.shape), dtype=np.float32).reshape(view.shape)
    tensor = view.view(dense(values, dtype))
    expected = view.array(values)
    assert tensor.shape == view.result == expected.shape
    np.testing.assert_array_equal(tensor.read_f32(), expected)
    np.testing.assert_array_equal(tensor.read_f32(1, 2), expected[1:2])


def test_rows_of_a_quantised_tensor_keep_their_codes() -> None:
    tensor = Q4_1.tensor(12, 64)
    order = [0, 1, 6, 7, 11]
    picked = Derived("t", (12, 64), rows=Rows(tuple(order))).view(tensor)
    whole, part = tensor.read(), picked.read()  # type: ignore[union-attr]
    for name in ("codes", "scales", "minimums"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[order])
    stacked = Derived("t", (3, 4, 64), part=1, rows=Rows(range(2, 4))).view(tensor)
    np.testing.assert_array_equal(stacked.read_f32(), tensor.read_f32(6, 8))
    scaled = Derived("t", (12, 64), scale=4.0).view(tensor)
    np.testing.assert_array_equal(scaled.read_f32(), tensor.read_f32() * 4)


def test_a_quantised_tensor_is_not_transposed() -> None:
    source = Source({"fc": Q4_1.tensor(32, 64, name="fc")})
    with pytest.raises(WeightsError, match=r"fc:t: is quantised .* only unquantised tensors can be transposed"):
        derived_source(source, {"fc:t": Derived("fc", (32, 64), transposed=True)}).tensor("fc:t")


@pytest.mark.parametrize(
    ("views", "message"),
    [
        ([Derived("t", (4, 8), rows=Rows(range(0, 3)))], "tensor t: row 3 is in 0 weights, must be in one"),
        ([Derived("t", (2, 8)), Derived("t", (2, 8), rows=Rows((1,)))], "tensor t: row 1 is in 2 weights"),
        ([Derived("t", (2, 2, 8), part=0)], "tensor t: entry 1, row 0 is in 0 weights"),
        ([Derived("t", (2, 8)), Derived("t", (2, 8), transposed=True)], r"weight 1: t is viewed in two ways"),
    ],
)
def test_every_row_is_used_once(views: list[Derived], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_views("t", {str(i): view for i, view in enumerate(views)})


def fused_graph(**changes: Any) -> Graph:
    """A layer whose q, k and v lie head by head in one tensor, rotated in pairs of neighbours; a transposed output."""
    builder = GraphBuilder("fused", VOCAB, HIDDEN)
    x = builder.embedding("embed")
    with builder.layer(0):
        parts = []
        for i, label in enumerate("qkv"):
            pairs = rotated_pairs(DIM).offsets if label != "v" else range(DIM)
            rows = Rows(tuple(i * DIM + offset for offset in pairs), 3 * DIM)
            weight = builder.derive("layers.0.qkv.weight", label, (3 * HIDDEN, HIDDEN), rows=rows)
            bias = builder.derive("layers.0.qkv.bias", label, (3 * HIDDEN,), rows=rows)
            parts.append(builder.linear(x, weight, HIDDEN, bias))
        attended = builder.attention(
            *parts, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM, rope=Rope("default", 100.0, DIM)
        )
        out = builder.derive("layers.0.out.weight", "t", (HIDDEN, HIDDEN), transposed=True)
        x = builder.add(x, builder.linear(attended, out, HIDDEN))
    graph = builder.build(builder.linear(x, "head", VOCAB), num_layers=1, max_position=64)
    return replace(graph, **changes)


def fused_weights() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    return {
        name: generator.standard_normal(shape, np.float32) / shape[-1] ** 0.5
        for name, shape in fused_graph().sources().items()
    }


def neighbour_rotated_logits(weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """The model as its authors would write it: heads cut out of the fused product, pairs (2i, 2i + 1) rotated."""
    x = weights["embed"][tokens]
    fused = x @ weights["layers.0.qkv.weight"].T + weights["layers.0.qkv.bias"]
    q, k, v = np.moveaxis(fused.reshape(len(tokens), HEADS, 3, DIM), 2, 0)
    cos, sin = (table[:, None, :] for table in Rope("default", 100.0, DIM).tables(len(tokens)))

    def rotate(y: np.ndarray) -> np.ndarray:
        even, odd = y[..., ::2], y[..., 1::2]
        return np.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(y.shape)

    scores = np.einsum("qhd,khd->hqk", rotate(q), rotate(k)) / np.sqrt(DIM)
    scores = np.where(np.tri(len(tokens), dtype=bool), scores, -np.inf)
    weighted = np.exp(scores - scores.max(-1, keepdims=True))
    attended = np.einsum("hqk,khd->qhd", weighted / weighted.sum(-1, keepdims=True), v).reshape(len(tokens), -1)
    logits: np.ndarray = (x + attended @ weights["layers.0.out.weight"]) @ weights["head"].T
    return logits


def test_a_graph_of_derived_weights_computes_what_their_tensors_say() -> None:
    graph, weights = fused_graph(), fused_weights()
    source = Source({name: dense(values, name=name) for name, values in weights.items()})
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
    expected = neighbour_rotated_logits(weights, tokens)
    views = derived_source(source, graph.derived)
    for form in (graph, optimize(graph)):
        found = reference_logits(form, lambda name: views.tensor(name).read_f32(), tokens)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    backend = CpuBackend.load(
        optimize(graph), source, quantization="f32", kv_cache_dtype="f32", max_model_len=64, num_blocks=1, threads=1
    )
    np.testing.assert_allclose(backend.prompt_logits(tokens), expected, rtol=1e-4, atol=1e-4)


def test_derived_rows_of_a_quantised_tensor_are_packed_as_they_are_read() -> None:
    graph = fused_graph()
    tensors: dict[str, Any] = {name: dense(values, name=name) for name, values in fused_weights().items()}
    tensors["layers.0.qkv.weight"] = Q4_1.tensor(3 * HIDDEN, HIDDEN, name="layers.0.qkv.weight")
    source = Source(tensors)
    lowered = lower(optimize(graph), source, quantization=None, kv=kv_cache_type("f32"), shape=StepShape(4, 1, 1))
    packing = next(item for item in lowered.packings if len(item.tensors) == 3)
    (weight,) = pack_all([packing], 1)
    for column, row in [(0, 0), (1, 2), (DIM, 3 * DIM), (HIDDEN, DIM), (2 * HIDDEN + 3, 2 * DIM + 3)]:
        np.testing.assert_array_equal(weight.column(column), tensors["layers.0.qkv.weight"].read_f32(row, row + 1)[0])


def test_the_checkpoint_is_checked_by_its_own_tensors() -> None:
    graph, weights = fused_graph(), fused_weights()
    assert graph.sources()["layers.0.qkv.weight"] == (3 * HIDDEN, HIDDEN)
    assert "layers.0.qkv.weight:q" not in graph.sources()
    check_weights(graph, MemoryCheckpoint(weights))
    wrong = {**weights, "layers.0.qkv.bias": np.zeros(5, np.float32)}
    del wrong["layers.0.out.weight"]
    with pytest.raises(ModelError, match=r"missing 1: layers.0.out.weight; wrong shape 1: layers.0.qkv.bias \(\(5,\)"):
        check_weights(graph, MemoryCheckpoint(wrong))


def test_derived_weights_that_do_not_fit_are_refused() -> None:
    good = fused_graph().derived
    changes: list[tuple[dict[str, Derived], str]] = [
        ({"more": Derived("x", (1, 1))}, "nothing reads the derived weight more"),
        ({"head": Derived("embed", (VOCAB, HIDDEN))}, "tensor embed is read both itself and as head"),
        ({"head": Derived("x", (3, 3))}, r"weight head is read as \(20, 32\), all of \(3, 3\) is \(3, 3\)"),
        ({"head": Derived("x", (3,), part=0)}, "has no view"),
        ({"head": Derived("x", (3, 3, 3), transposed=True)}, "has no view"),
    ]
    for derived, message in changes:
        with pytest.raises(ModelError, match=message):
            fused_graph(derived={**good, **derived}).check()


def test_derived_weights_print_once_for_all_layers() -> None:
    text = str(fused_graph())
    assert "linear(%in, layers.*.qkv.weight:q, bias layers.*.qkv.bias:q)" in text
    assert text.split("derived weights\n")[1].splitlines()[:3] == [
        "  layers.*.qkv.weight:q = rows 0, 2, 4, 6, 8, 10, ... (16) of every 48 of layers.*.qkv.weight [96, 32]",
        "  layers.*.qkv.bias:q = rows 0, 2, 4, 6, 8, 10, ... (16) of every 48 of layers.*.qkv.bias [96]",
        "  layers.*.qkv.weight:k = rows 16, 18, 20, 22, 24, 26, ... (16) of every 48 of layers.*.qkv.weight [96, 32]",
    ]
    assert text.endswith("layers.*.out.weight:t = transposed of layers.*.out.weight [32, 32]")
