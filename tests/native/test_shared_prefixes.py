"""Sequences whose tables begin with the same blocks are computed together, and have the bits they have apart."""

from __future__ import annotations

import numpy as np
import pytest

from octavo._native import KvType
from tests.native.attention import KV_TYPES, AttentionBench, Heads, Piece
from tests.native.harness import LEVELS, Array

SHAPES = [
    Heads(6, 2, 32),
    Heads(4, 2, 32, softcap=15.0),
    Heads(32, 8, 16),  # the states after the shared chunks do not all fit at once
    Heads(2, 2, 48, window=70),
    Heads(6, 1, 16, window=640),
    Heads(50, 1, 16),
    Heads(4, 2, 32, slopes=(0.3, 0.1, 0.02, 0.001)),
]
# For each sequence the names and lengths of what it has in common with others, its own tokens, those of the last step.
Tree = list[tuple[list[tuple[str, int]], int, int]]
TREES: dict[str, Tree] = {
    "one chunk": [([("a", 64)], 1 + i, 1) for i in range(9)],
    "not whole chunks": [([("a", 144)], 30, 1) for _ in range(12)],
    "a span": [([("a", 512)], 5 + 40 * i, 1) for i in range(7)],
    "spans and chunks": [([("a", 1088)], 3, 1) for _ in range(5)],
    "two of them in turn": [([("ab"[i % 2], (192, 640)[i % 2])], 17 + i, 1) for i in range(14)],
    "one in another": [([("a", 128), (f"b{i // 3}", 192)] if i > 3 else [("a", 128)], 20, 1) for i in range(13)],
    "beside others": [([("a", 256)], 9, 1) if i % 3 else ([], 100 * i + 1, 1) for i in range(10)],
    "several tokens": [([("a", 320)], 12 + i, 1 + i % 4) for i in range(11)],
    "one block more each": [([("a", 64), *((f"b{j}", 16) for j in range(i))], 2, 1) for i in range(8)],
    "a pair": [([("a", 576)], 4, 1) for _ in range(2)],
    "many": [([("a", 128)], 1 + i % 5, 1) for i in range(40)],
}


class Contents:
    """The rows of a tree, and tables in which each sequence has its own blocks or those of the first that has them."""

    def __init__(self, tree: Tree, heads: Heads, *, shared: bool) -> None:
        rng = np.random.default_rng(0)
        rows: dict[str, Array] = {}
        blocks: dict[str, Array] = {}
        order = iter(np.random.default_rng(1).permutation(4000).astype(np.int32))

        def draw(tokens: int) -> Array:
            return rng.standard_normal((tokens, heads.width)).astype(np.float32)

        def take(tokens: int) -> Array:
            return np.array([next(order) for _ in range(-(-tokens // 16))], np.int32)

        self.values: list[Array] = []
        self.tables: list[Array] = []
        self.known: list[int] = []  # leading positions that a sequence before has computed
        for parts, own, _ in tree:
            new = {name: draw(length) for name, length in parts if name not in rows}
            rows |= new
            self.values.append(np.concatenate([*(rows[name] for name, _ in parts), draw(own)]))
            if shared:
                blocks |= {name: take(length) for name, length in parts if name in new}
                self.tables.append(np.concatenate([*(blocks[name] for name, _ in parts), take(own)]))
            else:
                self.tables.append(take(len(self.values[-1])))
            self.known.append(sum(length for name, length in parts if name not in new) if shared else 0)


def last_step(tree: Tree, heads: Heads, level: str, threads: int, *, kv: KvType, shared: bool) -> tuple[Array, float]:
    """The rows of the step that computes the last tokens of all sequences, and the bytes it read from the pool."""
    contents = Contents(tree, heads, shared=shared)
    bench = AttentionBench(level, heads, kv=kv, tokens=1300, blocks=4000, sequences=len(tree), threads=threads)
    pieces, rows = [], []
    for (_, _, count), x, table, known in zip(tree, contents.values, contents.tables, contents.known, strict=True):
        end = len(x) - count
        if end > known:
            bench.step([Piece(known, end - known, table)], x[known:end])
        pieces.append(Piece(end, count, table))
        rows.append(x[end:])
    bench.plan.set_profiling(True)
    found = bench.step(pieces, np.concatenate(rows))
    (profile,) = [p for p in bench.plan.profile() if p["op"] == "attention"]
    return found.view(np.uint32), profile["bytes"]


CASES = [(tree, SHAPES[0], kv) for tree in TREES for kv in (KvType.F32, KvType.BF16)]
CASES += [("one in another", SHAPES[0], kv) for kv in KV_TYPES if kv not in (KvType.F32, KvType.BF16)]
CASES += [(tree, heads, KvType.BF16) for tree in ("a span", "one in another", "several tokens") for heads in SHAPES[1:]]


@pytest.mark.parametrize(("tree", "heads", "kv"), CASES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_sequences_have_the_same_bits_with_blocks_in_common_and_apart(
    level: str, tree: str, heads: Heads, kv: KvType
) -> None:
    apart, _ = last_step(TREES[tree], heads, level, 2, kv=kv, shared=False)
    for threads in (1, 3):
        together, _ = last_step(TREES[tree], heads, level, threads, kv=kv, shared=True)
        np.testing.assert_array_equal(together, apart, err_msg=f"{threads} threads")


@pytest.mark.parametrize(
    ("tree", "heads", "once"),
    [
        ("not whole chunks", SHAPES[0], True),
        ("one in another", SHAPES[0], True),
        ("two of them in turn", SHAPES[1], True),
        ("many", SHAPES[2], True),
        ("one chunk", SHAPES[3], True),
        ("one chunk", SHAPES[4], True),
        ("a span", SHAPES[3], False),
        ("one chunk", SHAPES[5], False),
    ],
    ids=str,
)
def test_what_sequences_share_is_read_once_for_several(tree: str, heads: Heads, once: bool) -> None:
    """Not where a window has been passed, nor where a group alone fills an item."""
    (_, apart), (_, together) = (
        last_step(TREES[tree], heads, "", 1, kv=KvType.BF16, shared=shared) for shared in (False, True)
    )
    assert together < 0.75 * apart if once else together == apart
