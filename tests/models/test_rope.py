"""Rope frequencies and tables equal transformers', in every scaling and from every place a configuration has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.errors import ModelError
from octavo.models.config import ConfigReader, read_layer_ropes, read_rope
from octavo.models.rope import QueryScaling, Rope

LINEAR = {"rope_type": "linear", "factor": 2.5}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
YARN_SHARP = {**YARN, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False}
LLAMA4 = {**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0}
SCALINGS = [LINEAR, LLAMA3, LLAMA4, YARN, YARN_SHARP]


def rope_of(values: dict[str, Any], max_position: int = 131072, dim: int = 128) -> Rope:
    return read_rope(ConfigReader(values, "llama"), dim, max_position)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_frequencies_equal_transformers(scaling: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=1,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 500000.0, **scaling},
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
    rope = rope_of({"rope_parameters": {"rope_theta": 500000.0, **scaling}})
    np.testing.assert_allclose(rope.inverse_frequencies(), expected.numpy(), rtol=1e-6)
    assert rope.attention_factor == pytest.approx(attention_factor)


def test_tables_follow_float32_angles_to_the_last_position() -> None:
    rope = Rope("default", 100000.0, 64)
    cos, sin = rope.tables(8192)
    exponents = torch.arange(0, 64, 2, dtype=torch.float) / 64
    angles = torch.arange(8192).float()[:, None] * (1.0 / (100000.0**exponents))
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (8192, 32)
    # One unit in the last place of a frequency moves the angle at position 8191 by up to 5e-4.
    np.testing.assert_allclose(cos, angles.cos().numpy(), atol=1e-3)
    np.testing.assert_allclose(sin, angles.sin().numpy(), atol=1e-3)


def test_tables_carry_the_attention_factor() -> None:
    plain = Rope("default", 10000.0, 8).tables(5)
    scaled = Rope("default", 10000.0, 8, attention_factor=1.5).tables(5)
    np.testing.assert_allclose(scaled[0], plain[0] * 1.5, rtol=1e-6)
    np.testing.assert_allclose(scaled[1], plain[1] * 1.5, rtol=1e-6)


def test_factors_divide_the_plain_frequencies() -> None:
    llama3 = rope_of({"rope_theta": 500000.0, "rope_scaling": LLAMA3})
    plain = Rope("default", 500000.0, 128).inverse_frequencies()
    factors = (plain / llama3.inverse_frequencies()).tolist()
    rope = rope_of({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "factors", "factors": factors}})
    np.testing.assert_allclose(rope.inverse_frequencies(), llama3.inverse_frequencies(), rtol=1e-6)


def longrope(original: int, **more: Any) -> dict[str, Any]:
    factors = {"short_factor": [1.0 + i / 100 for i in range(64)], "long_factor": [2.0 + i for i in range(64)]}
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": original,
        **factors,
        **more,
    }


@pytest.mark.parametrize(("original", "length"), [(4096, 4097), (131072, 1)])
def test_longrope_has_the_long_factors_where_a_model_is_for_more_positions_than_at_first(
    original: int, length: int
) -> None:
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=1, max_position_embeddings=131072, rope_parameters=longrope(original)
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
    for scaling in (longrope(original), {**longrope(original), "rope_type": None, "type": "su"}):
        rope = rope_of({"rope_scaling": scaling})
        np.testing.assert_allclose(rope.inverse_frequencies(), expected.numpy(), rtol=1e-6)
        assert rope.attention_factor == pytest.approx(attention_factor)
    assert rope_of({"rope_parameters": longrope(original, attention_factor=1.25)}).attention_factor == 1.25


def test_dynamic_frequencies_are_those_of_the_models_own_length() -> None:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=1,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0},
    )
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=config.max_position_embeddings)
    rope = rope_of({"rope_theta": 500.0, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    np.testing.assert_allclose(rope.inverse_frequencies(), expected.numpy(), rtol=1e-6)


def test_a_part_of_a_head_is_rotated_where_a_family_has_that() -> None:
    def dim(values: dict[str, Any], partial: float = 0.5) -> int:
        return read_rope(ConfigReader(values, "glm"), 128, 4096, partial=partial).dim

    assert dim({}) == 64
    assert dim({"partial_rotary_factor": 0.75}) == 96
    assert dim({"partial_rotary_factor": 0.75, "rope_parameters": {"partial_rotary_factor": 0.25}}) == 32
    for factor in (1.5, 0.01):
        with pytest.raises(ModelError, match=f"partial_rotary_factor = {factor} .* an even part of a head of 128"):
            dim({"partial_rotary_factor": factor})


def test_full_and_sliding_layers_have_ropes_of_their_own() -> None:
    def both(values: dict[str, Any]) -> tuple[Rope, Rope]:
        return read_layer_ropes(ConfigReader(values, "gemma3_text"), 128, 4096, theta=1e6, local_theta=1e4)

    assert both({}) == (Rope("default", 1e6, 128), Rope("default", 1e4, 128))
    stretched = Rope("linear", 5e5, 128, factor=8.0), Rope("default", 300.0, 128)
    scaling = {"rope_type": "linear", "factor": 8.0}
    assert both({"rope_theta": 5e5, "rope_local_base_freq": 300, "rope_scaling": scaling}) == stretched
    nested = {
        "full_attention": {**scaling, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300},
    }
    assert both({"rope_parameters": nested}) == stretched
    for values in ({"rope_parameters": scaling}, {"rope_parameters": {**nested, "chunked_attention": {}}}):
        with pytest.raises(ModelError, match=r"rope_parameters\."):
            both(values)


def test_queries_grow_with_the_logarithm_of_their_position() -> None:
    factors = QueryScaling(0.1, 100, 1).factors(1000)
    assert factors.dtype == np.float32
    assert (factors[:99] == 1).all()
    np.testing.assert_allclose(factors[[99, 199, 899]], 1 + 0.1 * np.log([2, 3, 10]), rtol=1e-6)


@pytest.mark.parametrize("scaling", [{}, *SCALINGS], ids=lambda scaling: scaling.get("rope_type", "default"))
def test_old_and_new_places_of_the_rope_fields_are_one(scaling: dict[str, Any]) -> None:
    new = rope_of({"rope_parameters": {"rope_theta": 500000.0, **scaling}})
    old = rope_of({"rope_theta": 500000.0, "rope_scaling": scaling or None})
    legacy = {("type" if name == "rope_type" else name): value for name, value in scaling.items()}
    assert new == old == rope_of({"rope_theta": 500000.0, "rope_scaling": legacy})


def test_theta_defaults_to_ten_thousand() -> None:
    assert rope_of({}) == Rope("default", 10000.0, 128)


def test_yarn_takes_its_factor_from_the_two_context_lengths() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 1024}
    assert rope_of({"rope_scaling": scaling}, max_position=8192).factor == 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, r"rope_scaling\.rope_type = 'proportional'"),
        ({"rope_scaling": {"type": "longrope"}}, r"rope_scaling\.short_factor = None .* list of 64"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0]}}, r"long_factor"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 9.0}}, r"factor = 2.0 .* must be 1.0"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "mscale": 9.0}}, r"mscale = 9.0"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [8, 8]}}, r"mrope_section = \[8, 8\]"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {**LINEAR, "factor": -1}}, r"factor = -1 .* positive"),
        ({"rope_scaling": {**LINEAR, "factor": float("nan")}}, r"factor = nan .* positive"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, r"high_freq_factor = 0.5 .* no less than low"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0]}}, r"factors = \[1.0\] .* 64 positive numbers"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type = \['yarn'\]"),
        ({"rope_scaling": "linear"}, r"rope_scaling = 'linear' .* an object"),
        ({"rope_theta": True}, r"rope_theta = True .* positive number"),
        ({"rope_theta": 1, "rope_scaling": YARN}, r"theta"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor = 0.5"),
    ],
)
def test_rope_that_cannot_be_honoured_is_refused_by_name_and_value(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        rope_of(values)


@pytest.mark.parametrize(
    ("values", "dim"),
    [
        ({}, 32),
        ({"partial_rotary_factor": 0.5}, 64),
        ({"partial_rotary_factor": 0.5, "rope_scaling": LINEAR}, 64),
        ({"rope_parameters": {"partial_rotary_factor": 0.4}}, None),
        ({"rope_parameters": {"partial_rotary_factor": 0.375, "rope_type": "default"}}, 48),
        ({"partial_rotary_factor": 1.5}, None),
    ],
)
def test_part_of_a_head_is_rotated_where_the_family_has_that(values: dict[str, Any], dim: int | None) -> None:
    config = ConfigReader(values, "phi")
    if dim is None:
        with pytest.raises(ModelError, match=r"partial_rotary_factor = .* an even part of a head of 128"):
            read_rope(config, 128, 2048, partial=0.25)
    else:
        assert read_rope(config, 128, 2048, partial=0.25).dim == dim
