"""Plans check what they are built from and what a step is given, and compute the logits of any number of rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo._native import Act, Activation, Elementwise, Epilogue, Form, KvType, Plan
from tests.native.harness import LEVELS, Array, Bench, Shape, make_weight

VOCAB, WIDTH = 50, 32
F32 = Shape(Form.F32)


def embedding_model(level: str, rows: int, head_rows: int, threads: int = 2) -> tuple[Bench, Array]:
    """Logits of a token: its embedding times the embedding's own matrix. Returns the plan and all tokens' logits."""
    weight = make_weight(F32, VOCAB, WIDTH)
    bench = Bench(level, rows, threads, vocab=VOCAB, head_rows=head_rows)
    hidden = bench.slot(Act.F32, WIDTH)
    gathered = bench.slot(Act.F32, WIDTH, rows=head_rows)
    logits = bench.slot(Act.F32, VOCAB, rows=head_rows)

    def add(plan: Plan) -> None:
        plan.add_embed("embedding", weight.packed, hidden.activation())
        plan.begin_head()
        plan.add_norm("gather", hidden.activation(), WIDTH, None, None, 0.0, False, gathered.activation(), gather=True)
        plan.add_linear("head", weight.packed, gathered.activation(), None, Epilogue.Store, logits.activation(), VOCAB)
        plan.set_logits(logits.activation())

    bench.add(add)
    return bench, weight.values.astype(np.float64) @ weight.values.T


@pytest.mark.parametrize("head_rows", [1, 3, 64])
@pytest.mark.parametrize("level", LEVELS)
def test_logits_of_any_rows_come_in_slices(level: str, head_rows: int) -> None:
    bench, expected = embedding_model(level, 100, head_rows)
    plan, rng = bench.plan, np.random.default_rng(0)
    for rows in (1, 2, head_rows, 65, 100):
        tokens, wanted = rng.integers(0, VOCAB, 100), rng.integers(0, 100, rows)
        plan.tokens[:], plan.logit_rows[:rows] = tokens, wanted
        plan.starts[0], plan.counts[0] = 0, 100
        logits = np.full((rows + 1, VOCAB), 7, np.float32)
        plan.run(1, rows, logits=logits)
        np.testing.assert_allclose(logits[:rows], expected[tokens[wanted]], rtol=1e-5, atol=1e-5)
        assert (logits[rows] == 7).all()
    plan.run(1, 0)  # no logits wanted: the head does not run


def build(operation: Callable[[Plan], Any]) -> Callable[[], None]:
    def run() -> None:
        operation(Plan(LEVELS[-1], 1, 16, 2, 4, 4, VOCAB, 1 << 14))

    return run


def value(width: int = 64, data: int = 0, form: Act = Act.F32, **options: Any) -> Activation:
    return Activation(form, width, data, **options)


def heads(plan: Plan, length: int = 64 * 8, **changes: Any) -> None:
    given: dict[str, Any] = {
        "name": "rope",
        "qkv": value(64),
        "layer": 0,
        "q_heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "rope_dim": 16,
        "tables": plan.add_rope_tables(np.ones(length, np.float32), np.ones(length, np.float32)),
        "q_norm": None,
        "k_norm": None,
        "norm_eps": 0.0,
        "q": value(32, 8192),
    }
    plan.add_rope(**{**given, **changes})


def attend(plan: Plan, **changes: Any) -> None:
    given: dict[str, Any] = {
        "name": "attention",
        "q": value(32, 8192),
        "layer": 0,
        "q_heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "scale": 1.0,
        "softcap": 0.0,
        "window": 0,
        "out": value(32, 0),
    }
    plan.add_attention(**{**given, **changes})


def linear(plan: Plan, shape: Shape = F32, **changes: Any) -> None:
    given: dict[str, Any] = {
        "name": "linear",
        "weight": make_weight(shape, 64, 64).packed,
        "x": value(64, form=shape.act, scales=4096, scaled_sums=5120, sums=6144),
        "bias": None,
        "epilogue": Epilogue.Store,
        "out": value(64, 8192),
        "out_columns": 64,
    }
    plan.add_linear(**{**given, **changes})


def norm(plan: Plan, **changes: Any) -> None:
    given: dict[str, Any] = {
        "name": "norm",
        "x": value(64),
        "width": 64,
        "weight": None,
        "bias": None,
        "eps": 0.0,
        "layer": False,
        "out": value(64, 8192),
    }
    plan.add_norm(**{**given, **changes})


def add(plan: Plan, kind: Elementwise = Elementwise.Add, **changes: Any) -> None:
    given: dict[str, Any] = {
        "name": "add",
        "kind": kind,
        "a": value(64),
        "b": value(64, 4096),
        "width": 64,
        "scalar": 1.0,
        "out": value(64, 8192),
    }
    plan.add_elementwise(**{**given, **changes})


def in_head(operation: Callable[[Plan], None]) -> Callable[[Plan], None]:
    def run(plan: Plan) -> None:
        plan.begin_head()
        operation(plan)

    return run


def after(first: Callable[[Plan], None], second: Callable[[Plan], None]) -> Callable[[Plan], None]:
    def run(plan: Plan) -> None:
        first(plan)
        second(plan)

    return run


def pool(plan: Plan) -> None:
    plan.make_pool(4, KvType.F32)


def wide_heads(plan: Plan) -> None:
    heads(plan, head_dim=32, qkv=value(128), q=value(64, 8192))


W8 = Shape(Form.W8, 32, 128)
EMBEDDING, SMALL = make_weight(F32, 64, 32).packed, make_weight(F32, 4, 32).packed
ONES = np.ones(64, np.float32)
WIDE = value(64, 0, Act.I8, group=64)
REFUSED: list[tuple[Callable[[Plan], Any], str]] = [
    (lambda p: norm(p, x=value(64, 1 << 14)), "outside the arena"),
    (lambda p: norm(p, x=value(64, -64)), "outside the arena"),
    (lambda p: norm(p, x=value(64, 2)), "unaligned"),
    (lambda p: norm(p, out=value(64, (1 << 14) - 4096 + 64)), "outside the arena"),
    (lambda p: norm(p, x=value(1 << 40), width=64), "width 1099511627776"),
    (lambda p: norm(p, x=value(-5), width=-5), "a norm reads"),
    (lambda p: norm(p, width=65), "a norm reads"),
    (lambda p: norm(p, width=0), "a norm reads"),
    (lambda p: norm(p, x=value(64, form=Act.BF16)), "a norm reads f32"),
    (lambda p: norm(p, weight=ONES[:63]), "norm weight width"),
    (lambda p: norm(p, weight=ONES, bias=ONES[:63]), "norm bias width"),
    (lambda p: norm(p, width=40, out=value(48, 8192)), "padded to 32"),
    (lambda p: norm(p, out=value(32, 8192)), "padded to 32"),
    (lambda p: norm(p, out=value(64, 8192, Act.I8, group=48)), "groups of 16, 32 or a multiple of 64"),
    (lambda p: norm(p, out=value(320, 8192, Act.I8, group=320)), "groups of 16, 32 or a multiple of 64"),
    (lambda p: norm(p, out=value(96, 8192, Act.I8, group=64)), "whole groups"),
    (lambda p: norm(p, out=value(64, 8192, Act.I8, group=64, rotation=16)), "blocks of 32 or 64"),
    (lambda p: norm(p, out=value(64, 8192, Act.I8, scales=1 << 14)), "outside the arena"),
    (lambda p: norm(p, out=value(64, 8192, Act.I8, group=16, rotation=32)), "whole rotated blocks"),
    (lambda p: norm(p, gather=True), "only the head gathers"),
    (lambda p: linear(p, x=value(64, form=Act.BF16)), "do not have the form"),
    (lambda p: linear(p, x=value(32)), "activations are 32 wide, the weight's padded k is 64"),
    (lambda p: linear(p, Shape(Form.W8, 16, 128)), "no multiple of the activation group"),
    (lambda p: linear(p, Shape(Form.W8, 32, 128, rotation=32)), "not rotated alike"),
    (lambda p: linear(p, Shape(Form.W4, 64, 8), x=value(64, form=Act.I8, group=64)), "wide groups are of w8"),
    (lambda p: linear(p, W8, x=value(64, form=Act.I8, scales=4096, scaled_sums=1 << 14)), "outside the arena"),
    (lambda p: linear(p, out_columns=65), "output width"),
    (lambda p: linear(p, out_columns=0), "output width"),
    (lambda p: linear(p, epilogue=Epilogue.SiluMul), "output width"),
    (lambda p: linear(p, epilogue=Epilogue.Add, out=value(64, 8192, Act.BF16)), "a residual is f32"),
    (lambda p: linear(p, out=value(72, 8192, Act.BF16)), "padded to 32"),
    (lambda p: linear(p, out=value(96, 8192, Act.BF16)), "wider than the packed columns"),
    (lambda p: linear(p, bias=np.ones(65, np.float32)), "bias width"),
    (lambda p: linear(p, out=value(64, 1 << 14)), "outside the arena"),
    (lambda p: p.add_embed("embedding", EMBEDDING, value(16)), "an embedding writes f32"),
    (lambda p: p.add_embed("embedding", EMBEDDING, value(32, form=Act.BF16)), "an embedding writes f32"),
    (lambda p: p.add_embed("embedding", SMALL, value(1 << 13)), "outside the arena"),
    (in_head(lambda p: p.add_embed("embedding", EMBEDDING, value(32))), "not part of the head"),
    (lambda p: p.add_embed("embedding", EMBEDDING, value(32), 1.0, True, 1 << 20), "fewer rows than there are"),
    (lambda p: p.add_embed("embedding", EMBEDDING, value(32), 1.0, True, -1), "offset of an embedding: -1"),
    (lambda p: p.add_embed("embedding", EMBEDDING, value(32), 1.0, False, 1), "offset of an embedding: 1"),
    (lambda p: heads(p, k_norm=np.ones(32, np.float32)), "k norm width"),
    (after(heads, lambda p: attend(p, slopes=np.ones(1, np.float32))), "one for each query head"),
    (after(heads, lambda p: attend(p, slopes=np.ones(2, np.float32), softcap=1.0)), "and no soft cap"),
    (in_head(heads), "part of the body"),
    (in_head(attend), "part of the body"),
    (after(after(heads, pool), heads), "before the pool is made"),
    (after(after(heads, pool), attend), "before the pool is made"),
    (lambda p: heads(p, head_dim=24, q=value(48, 8192)), "head size 24"),
    (lambda p: heads(p, head_dim=0, q=value(0, 8192)), "head size 0"),
    (lambda p: heads(p, head_dim=592), "head size 592"),
    (lambda p: heads(p, rope_dim=18), "rope size"),
    (lambda p: heads(p, rope_dim=7), "rope size"),
    (lambda p: heads(p, rope_dim=-2), "rope size"),
    (lambda p: heads(p, q_heads=3, kv_heads=2), "multiple of kv heads"),
    (lambda p: heads(p, q_heads=0), "multiple of kv heads"),
    (lambda p: heads(p, qkv=value(63)), "qkv width"),
    (lambda p: heads(p, length=511), "shorter than the block table"),
    (lambda p: heads(p, tables=-1), "no rope tables -1"),
    (lambda p: heads(p, tables=1), "no rope tables 1"),
    (lambda p: p.add_rope_tables(np.ones(0, np.float32), np.ones(0, np.float32)), "tables are empty"),
    (lambda p: p.add_rope_tables(np.ones(2, np.float32), np.ones(3, np.float32)), "differ in size"),
    (lambda p: heads(p, q_norm=ONES[:15]), "q norm width"),
    (lambda p: heads(p, k_norm=ONES[:17]), "k norm width"),
    (lambda p: heads(p, q_norm=ONES[:16], wide_norms=True), "q norm width"),
    (lambda p: heads(p, k_norm=ONES[:32], wide_norms=True), "k norm width"),
    (lambda p: heads(p, wide_norms=True, norm_after=True), "comes before the rotation"),
    (lambda p: heads(p, norm_layer=True, norm_after=True), "comes before the rotation"),
    (lambda p: heads(p, factors=0), "no factors 0 of queries"),
    (lambda p: heads(p, factors=p.add_query_factors(ONES[:63])), "fewer than positions"),
    (lambda p: p.add_query_factors(ONES[:0]), "no factors of queries"),
    (lambda p: heads(p, q=value(32, 8192, Act.I8)), "queries are f32 or bf16"),
    (lambda p: heads(p, q=value(48, 8192)), "queries are f32 or bf16"),
    (lambda p: heads(p, layer=-1), "layer -1"),
    (after(heads, lambda p: heads(p, layer=1, q=value(32, 8192, Act.BF16))), "all layers have the same"),
    (attend, "no rope operation fills"),
    (after(heads, lambda p: attend(p, layer=1)), "no rope operation fills"),
    (after(heads, lambda p: attend(p, layer=-1)), "no rope operation fills"),
    (after(heads, lambda p: attend(p, q_heads=3, q=value(48, 8192), kv_heads=2)), "head shape"),
    (after(heads, lambda p: attend(p, q_heads=4, kv_heads=2, q=value(64, 8192), out=value())), "that the rope"),
    (after(heads, lambda p: attend(p, q=value(32, 8192, Act.BF16))), "that the rope operations"),
    (after(heads, lambda p: attend(p, out=value(31))), "attention writes f32"),
    (after(wide_heads, lambda p: attend(p, head_dim=32, q=value(64, 8192), out=WIDE)), "inside a head"),
    (after(heads, lambda p: attend(p, window=-1)), "below 0"),
    (after(heads, lambda p: attend(p, chunked=True)), "chunks of attention have a size"),
    (after(heads, lambda p: attend(p, softcap=-1.0)), "below 0"),
    (after(heads, lambda p: attend(p, out=value(32, 1 << 14))), "outside the arena"),
    (lambda p: add(p, b=None), "second operand"),
    (lambda p: add(p, Elementwise.Scale), "second operand"),
    (lambda p: add(p, a=value(63)), "elementwise operations"),
    (lambda p: add(p, out=value(63, 8192)), "elementwise operations"),
    (lambda p: add(p, width=0), "elementwise operations"),
    (lambda p: add(p, b=value(32, 4096)), "second operand"),
    (lambda p: add(p, b=value(64, 4096, Act.BF16)), "second operand"),
    (lambda p: add(p, Elementwise.Softcap, b=None, scalar=0.0), "soft cap and limit must be positive"),
    (lambda p: add(p, Elementwise.Clip, b=None, scalar=0.0), "soft cap and limit must be positive"),
    (pool, "a pool needs"),
    (after(heads, lambda p: p.make_pool(0, KvType.F32)), "a pool needs"),
    (after(heads, lambda p: p.make_pool(1 << 40, KvType.F32)), "a pool needs"),
    (after(heads, lambda p: p.make_pool(4, KvType.BF16)), "queries are f32"),
    (after(after(heads, pool), pool), "has one pool"),
    (after(heads, lambda p: p.run(1, 0)), "needs a pool"),
    (lambda p: p.set_logits(value(VOCAB)), "ends the head"),
    (in_head(lambda p: p.set_logits(value(VOCAB - 1))), "as wide as the vocabulary"),
    (in_head(lambda p: p.set_logits(value(64, form=Act.BF16))), "as wide as the vocabulary"),
    (in_head(lambda p: p.set_logits(value(64, 1 << 14))), "outside the arena"),
]


@pytest.mark.parametrize(("operation", "message"), REFUSED, ids=[f"{i}-{m}" for i, (_, m) in enumerate(REFUSED)])
def test_operations_that_do_not_fit_are_refused(operation: Callable[[Plan], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build(operation)()


def test_a_refused_operation_leaves_the_plan_as_it_was() -> None:
    """Nothing half-made is run: a step of a plan that refused all these does nothing."""
    plan = Plan(LEVELS[-1], 2, 16, 2, 4, 4, VOCAB, 1 << 14)
    late = [operation for operation, message in REFUSED if message == "outside the arena"]
    alone = [operation for operation in late if "<lambda>" in repr(operation)]
    assert len(alone) >= 6
    for operation in alone:
        with pytest.raises(ValueError, match="outside the arena"):
            operation(plan)
    plan.counts[0] = 5
    plan.arena[:] = 9
    plan.run(1, 0)
    assert (plan.arena == 9).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none", 1, 16, 2, 4, 4, VOCAB, 64), "OCTAVO_ISA=none"),
        ((LEVELS[0], 0, 16, 2, 4, 4, VOCAB, 64), "threads"),
        ((LEVELS[0], 1025, 16, 2, 4, 4, VOCAB, 64), "threads"),
        ((LEVELS[0], 1, 0, 2, 4, 4, VOCAB, 64), "max_tokens"),
        ((LEVELS[0], 1, 16, 2, 4, 4, 0, 64), "vocab"),
        ((LEVELS[0], 1, 1 << 40, 2, 4, 4, VOCAB, 64), "too large"),
        ((LEVELS[0], 1, 16, 1 << 23, 1 << 23, 4, VOCAB, 64), "too large"),
    ],
)
def test_plans_that_cannot_be_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(*arguments)


def ready() -> Plan:
    """A plan of a whole model in small: two sequences of up to 4 blocks, a pool of 6, 16 tokens a step."""
    weight = make_weight(F32, VOCAB, WIDTH).packed
    bench = Bench(LEVELS[-1], 16, sequences=2, table_stride=4, vocab=VOCAB, head_rows=4)
    hidden, q, out = bench.slot(Act.F32, 64), bench.slot(Act.F32, 32), bench.slot(Act.F32, 32)
    logits = bench.slot(Act.F32, VOCAB)

    def build_all(plan: Plan) -> None:
        plan.add_embed("embedding", weight, hidden.activation())
        heads(plan, qkv=hidden.activation(), q=q.activation())
        attend(plan, q=q.activation(), out=out.activation())
        plan.begin_head()
        plan.add_norm("gather", out.activation(), 32, None, None, 0.0, False, out.activation(), gather=True)
        plan.add_linear("head", weight, out.activation(), None, Epilogue.Store, logits.activation(), VOCAB)
        plan.set_logits(logits.activation())
        plan.make_pool(6, KvType.F32)

    bench.add(build_all)
    plan = bench.plan
    plan.tokens[:], plan.logit_rows[:] = 3, 0
    plan.starts[:], plan.counts[:], plan.block_tables[:] = [0, 7], [4, 1], [[0, 1, 2, 3], [4, 5, 0, 0]]
    plan.run(2, 1)
    return plan


@pytest.mark.parametrize(
    ("array", "index", "bad", "message"),
    [
        ("tokens", 0, -1, "token -1 is outside the vocabulary of 50"),
        ("tokens", 4, VOCAB, "token 50 is outside the vocabulary of 50"),
        ("starts", 0, -1, "outside the limits"),
        ("starts", 1, 64, "outside the limits"),
        ("starts", 1, 2**31 - 1, "outside the limits"),
        ("counts", 0, 0, "outside the limits"),
        ("counts", 0, -3, "outside the limits"),
        ("counts", 0, 16, "outside the limits"),
        ("counts", 0, 2**31 - 1, "outside the limits"),
        ("block_tables", (0, 0), 6, "block 6 is outside the pool of 6"),
        ("block_tables", (1, 0), -1, "block -1 is outside the pool of 6"),
        ("logit_rows", 0, 5, "logit row 5 is outside the step"),
        ("logit_rows", 0, -1, "logit row -1 is outside the step"),
    ],
)
def test_steps_with_values_out_of_range_are_refused(array: str, index: Any, bad: int, message: str) -> None:
    plan = ready()
    values = getattr(plan, array)
    good = values[index]
    values[index] = bad
    with pytest.raises(ValueError, match=message):
        plan.run(2, 1)
    values[index] = good
    plan.run(2, 1)


def test_block_tables_are_not_read_past_the_tokens() -> None:
    plan = ready()
    plan.block_tables[0, 1:] = plan.block_tables[1, 1:] = -1
    plan.run(2, 1)


def test_sizes_of_a_step_out_of_range_are_refused() -> None:
    plan = ready()
    for sequences in (0, -1, 3):
        with pytest.raises(ValueError, match="sequences of a step"):
            plan.run(sequences, 1)
    for rows in (-1, 6):
        with pytest.raises(ValueError, match="logit rows"):
            plan.run(2, rows)
    for shape in [(0, VOCAB), (1, VOCAB - 1), (1, VOCAB + 1)]:
        with pytest.raises(ValueError, match="logits must hold the rows wanted"):
            plan.run(2, 1, logits=np.zeros(shape, np.float32))


def test_copies_of_blocks_outside_the_pool_are_refused() -> None:
    plan = ready()
    for pair in [(0, 6), (6, 0), (-1, 0), (0, -1)]:
        with pytest.raises(ValueError, match="block copy outside the pool"):
            plan.copy_blocks(np.array([pair], np.int32))
    with pytest.raises(ValueError, match="two columns"):
        plan.copy_blocks(np.zeros((1, 3), np.int32))
    plan.copy_blocks(np.zeros((0, 2), np.int32))
    plan.copy_blocks(np.array([[2, 2]], np.int32))


def test_a_profile_counts_operations_since_it_was_switched_on() -> None:
    plan = ready()
    assert plan.profile() == []
    plan.set_profiling(True)
    for _ in range(3):
        plan.run(2, 5)
    entries = {entry["op"]: entry for entry in plan.profile()}
    assert set(entries) == {"embedding", "rope", "attention", "attention.merge", "gather", "head", "sample"}
    assert entries["attention"]["calls"] == 3
    assert entries["head"]["calls"] == 6  # five rows in slices of four
    assert entries["head"]["bytes"] == 6 * 64 * 32 * 4
    assert entries["head"]["operations"] == 3 * 2 * 5 * 64 * 32
    assert entries["attention"]["operations"] > 0
    assert entries["sample"]["bytes"] == 3 * 5 * VOCAB * 4
    assert entries["attention.merge"]["bytes"] == 0
    assert all(entries[op]["bytes"] > 0 for op in ("embedding", "rope", "gather"))
    assert all(entry["seconds"] >= 0 for entry in entries.values())
    plan.set_profiling(False)
    plan.run(2, 1)
    assert plan.profile() == []


def test_arrays_are_views_of_the_plan_and_keep_it_alive() -> None:
    plan = ready()
    tokens, arena = plan.tokens, plan.arena
    assert (len(tokens), plan.block_tables.shape, plan.starts.dtype) == (16, (2, 4), np.int32)
    assert (plan.threads, plan.level) == (2, LEVELS[-1])
    del plan
    tokens[:] = 1
    arena[:64] = 1
    assert tokens.sum() == 16
