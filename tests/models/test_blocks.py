"""Blocks: numbers in the precision of a model's weights, and the rows of fused projections."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.models.blocks import SelfAttention, as_stored
from octavo.models.config import ConfigReader
from octavo.models.graph import Graph, GraphBuilder
from octavo.models.rope import Rope


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_number_is_rounded_as_torch_rounds_it(name: str, dtype: str) -> None:
    for width in (576, 2304, 3072, 3584, 5376):
        expected = torch.tensor(width**0.5).to(getattr(torch, dtype)).float().item()
        assert as_stored(ConfigReader({name: dtype}, "gemma"), width**0.5) == expected
        assert as_stored(ConfigReader({}, "gemma"), width**0.5) == np.float32(width**0.5)


def graph_of(attention: SelfAttention) -> Graph:
    builder = GraphBuilder("fused", vocab_size=20, hidden_size=attention.hidden)
    x = builder.embedding("embed")
    with builder.layer(0):
        x = attention(builder, x, "layers.0")
    return builder.build(builder.linear(x, "head", 20), num_layers=1, max_position=16)


def test_fused_rows_are_picked_by_head_and_pair() -> None:
    plain = SelfAttention(hidden=8, q_heads=2, kv_heads=1, head_dim=4, rope=Rope("default", 100.0, 2), qkv="qkv")
    assert graph_of(plain).derived == {}
    (view,) = (graph_of(SelfAttention(**{**vars(plain), "neighbours": True})).derived).values()
    assert view.rows is not None
    assert view.rows.offsets == tuple(range(16))  # a pair of two is in order already
    wide = {**vars(plain), "neighbours": True, "rope": Rope("default", 100.0, 4)}
    (view,) = graph_of(SelfAttention(**wide)).derived.values()
    assert view.rows is not None
    assert view.rows.offsets == (0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 13, 14, 15)
    grouped = {**vars(plain), "grouped": True, "q_heads": 4, "kv_heads": 2, "head_dim": 2}
    (view,) = graph_of(SelfAttention(**grouped)).derived.values()
    assert view.rows is not None
    heads = [offset // 2 for offset in view.rows.offsets[::2]]
    assert heads == [0, 1, 4, 5, 2, 6, 3, 7]


def test_biases_are_ordered_as_their_weights() -> None:
    attention = SelfAttention(
        hidden=8, q_heads=2, kv_heads=1, head_dim=4, rope=Rope("default", 100.0, 4), qkv_bias=True, neighbours=True
    )
    derived = graph_of(attention).derived
    assert set(derived) == {
        f"layers.0.self_attn.{part}_proj.{kind}:ordered" for part in "qk" for kind in ("weight", "bias")
    }
    for part in "qk":
        weight, bias = (derived[f"layers.0.self_attn.{part}_proj.{kind}:ordered"] for kind in ("weight", "bias"))
        assert weight.rows == bias.rows
