"""What is said of a model without reading its weights: its summary and the memory it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import CapacityError, ParameterError
from octavo.frontend.description import ModelDescription, describe_model, fit_memory, memory_needs
from octavo.frontend.options import EngineOptions
from octavo.planning.hardware import MemoryCeiling, probe
from octavo.planning.memory import MemoryNeeds


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[ModelDescription]:
    with describe_model(smollm2_path) as description:
        yield description


def needs(model: ModelDescription, **options: Any) -> MemoryNeeds:
    return memory_needs(model, EngineOptions(**options))


def test_the_summary_names_architecture_sizes_and_formats(model: ModelDescription) -> None:
    for part in ("135M parameters", "30 layers", "hidden 576", "vocabulary 49,152", "context 8,192", "Q4_1", "Q8_0"):
        assert part in model.summary


def test_weights_take_what_their_form_takes(model: ModelDescription) -> None:
    size = {form: needs(model, quantization=form).weights_bytes for form in (None, "none", "w8", "w4")}
    parameters, embedding = 134_515_008, 49152 * 576
    assert size["none"] == pytest.approx(2 * parameters, rel=0.01)
    assert parameters < size["w8"] < parameters * 1.13
    # The embedding, which is the head too, stays in w8.
    assert size["w4"] == pytest.approx(0.625 * (parameters - embedding) + 1.0625 * embedding, rel=0.01)
    # As in the file: 4 bits with f16 scale and minimum per 32, but the embedding 8 bits with a scale.
    assert size[None] == pytest.approx((parameters - embedding) * 0.625 + embedding * 1.0625, rel=0.01)


def test_a_block_holds_keys_and_values_of_all_layers(model: ModelDescription) -> None:
    assert needs(model).block_bytes == 30 * 2 * 3 * 64 * 16 * 2
    assert needs(model, kv_cache_dtype="f32").block_bytes == 2 * needs(model).block_bytes
    assert needs(model, kv_cache_dtype="fp8").block_bytes == needs(model).block_bytes // 2
    assert needs(model, kv_cache_dtype="int8").block_bytes == 30 * 3 * (2 * 64 * 16 + 64)


def test_smaller_forms_are_offered_where_they_help(model: ModelDescription) -> None:
    def offered(**options: Any) -> list[str]:
        return [other.setting for other in needs(model, **options).alternatives]

    assert offered(quantization="none") == ["quantization=w8", "quantization=w4", "kv_cache_dtype=int8"]
    assert offered(quantization="w4") == ["kv_cache_dtype=int8"]
    assert offered(quantization="w4", kv_cache_dtype="fp8") == []
    assert offered(quantization="w4", kv_cache_dtype="f32") == ["kv_cache_dtype=bf16", "kv_cache_dtype=int8"]


def test_what_does_not_fit_is_refused_with_the_settings_that_would(model: ModelDescription) -> None:
    hardware = replace(probe(), memory=(MemoryCeiling("test", 394_000_000, 0),))
    with pytest.raises(CapacityError, match="quantization=w8, or quantization=w4"):
        fit_memory(model, EngineOptions(quantization="none", max_num_seqs=4), hardware)
    plan = fit_memory(model, EngineOptions(quantization="w4", max_num_seqs=4), hardware)
    assert plan.max_model_len < 8192
    assert plan.total_bytes <= 354_600_000


def test_a_length_above_the_models_is_refused(model: ModelDescription) -> None:
    assert needs(model, max_model_len=8192).max_model_len == 8192
    with pytest.raises(ParameterError, match="at most the model's 8192"):
        needs(model, max_model_len=8193)


def test_the_arena_grows_with_the_largest_step(model: ModelDescription) -> None:
    small = needs(model, max_num_batched_tokens=16, max_num_seqs=1).arena_bytes
    large = needs(model, max_num_batched_tokens=2048).arena_bytes
    assert 0 < small < large < 200_000_000
