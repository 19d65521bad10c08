"""Lowering of mixtures and latent attention: what is packed and counted, and sizes that cannot be run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from octavo._native import Form
from octavo.backends.cpu.lowering import StepShape, lower
from octavo.backends.cpu.sizes import cpu_sizes
from octavo.errors import ModelError
from octavo.kv_cache import kv_cache_type
from octavo.models.mixture import MoeExperts
from octavo.models.registry import build_graph
from octavo.models.rewrites import optimize
from octavo.weights.checkpoint import open_checkpoint
from tests.models.tiny import read_config


def test_memory_counts_every_expert_and_the_rows_between_their_products(tiny_models: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(tiny_models["mixtral"])
    graph = optimize(build_graph(checkpoint.config))
    sizes = {
        tokens: cpu_sizes(
            graph,
            checkpoint,
            quantization=None,
            kv_cache_dtype="auto",
            max_num_batched_tokens=tokens,
            max_num_seqs=4,
        )
        for tokens in (512, 1024)
    }
    stored = sum(2 * math.prod(shape) for name, shape in graph.weights().items() if "experts" in name)
    assert sizes[512].weights_bytes == sizes[1024].weights_bytes > stored
    mixture = next(node for node in graph.nodes if isinstance(node, MoeExperts))
    assert sizes[1024].arena_bytes - sizes[512].arena_bytes > 512 * mixture.top_k * mixture.intermediate * 2


def test_routers_stay_in_f32_and_expansions_in_bf16(tiny_models: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(tiny_models["deepseek_v3"])
    graph = optimize(build_graph(checkpoint.config))
    packings = lower(graph, checkpoint, quantization="w4", **_kv(), shape=StepShape(32, 4, 8)).packings
    forms = {packing.tensors[0].name: packing.form.form for packing in packings}
    assert {form for name, form in forms.items() if name.endswith("mlp.gate.weight")} == {Form.F32}
    assert {form for name, form in forms.items() if "kv_b_proj" in name} == {Form.BF16}
    assert {form for name, form in forms.items() if ".experts." in name} == {Form.W4}
    assert sum("kv_b_proj" in name for name in forms) == 3 * 2 * 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("qk_nope_head_dim", 48, "qk_nope_head_dim = 48, must be a multiple of 32"),
        ("v_head_dim", 32, "v_head_dim = 32, must be a multiple of 64"),
        ("kv_lora_rank", 96, "kv_lora_rank = 96, must be a multiple of 64"),
        ("kv_lora_rank", 1024, "1056, must be at most 576"),
    ],
)
def test_latents_of_other_sizes_are_refused_by_name(
    field: str, value: int, message: str, tiny_models: dict[str, Path]
) -> None:
    config = {**read_config(tiny_models["deepseek_v2"]), field: value}
    config.pop("qk_head_dim", None)
    graph = optimize(build_graph(config))
    with pytest.raises(ModelError, match=message):
        lower(graph, open_checkpoint(tiny_models["deepseek_v2"]), quantization=None, **_kv(), shape=StepShape(32, 4, 8))


def _kv() -> dict[str, bool]:
    return {"kv": kv_cache_type("bf16")}
