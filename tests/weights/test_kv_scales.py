"""Scales of an fp8 KV cache are found under the names they are stored by; what cannot be right is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.errors import WeightsError
from octavo.weights.kv_scales import is_kv_scale, static_kv_scales
from octavo.weights.safetensors_files import SafetensorsCheckpoint

PREFIX = "model.layers.{}.self_attn."


def checkpoint(folder: Path, values: Mapping[str, object]) -> SafetensorsCheckpoint:
    tensors = {name: np.array(value, np.float32) for name, value in values.items()}
    save_file(tensors | {"model.norm.weight": np.ones(4, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return SafetensorsCheckpoint(folder)


def both(layers: int, k: str = "k_scale", v: str = "v_scale") -> dict[str, object]:
    found: dict[str, object] = {PREFIX.format(layer) + k: 0.5 + layer for layer in range(layers)}
    return found | {PREFIX.format(layer) + v: [2.0 + layer] for layer in range(layers)}


@pytest.mark.parametrize(
    ("k", "v"), [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("attn.k_scale", "attn.v_scale")]
)
def test_scales_of_all_layers_are_read(tmp_path: Path, k: str, v: str) -> None:
    opened = checkpoint(tmp_path, both(2, k, v))
    assert static_kv_scales(opened, 2) == [(0.5, 2.0), (1.5, 3.0)]
    assert [name for name in opened.names() if not is_kv_scale(name)] == ["model.norm.weight"]


def test_a_checkpoint_without_them_has_none(tmp_path: Path) -> None:
    assert static_kv_scales(checkpoint(tmp_path, {}), 2) == []
    assert not is_kv_scale("model.layers.0.self_attn.k_proj.weight_scale")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({PREFIX.format(1) + "v_scale": None}, "layers.1.self_attn.v_scale' is missing"),
        ({PREFIX.format(0) + "k_scale": [1.0, 2.0]}, "layers.0.self_attn.k_scale' has shape"),
        ({PREFIX.format(0) + "k_scale": 0.0}, "layers.0.self_attn.k_scale' is 0"),
        ({PREFIX.format(0) + "v_scale": np.nan}, "layers.0.self_attn.v_scale' is nan"),
        ({PREFIX.format(2) + "v_scale": 1.0}, "is of layer 2; the model has 2"),
        ({PREFIX.format(1) + "k_proj.k_scale": 1.0}, "are the same scale"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    values = {name: value for name, value in (both(2) | change).items() if value is not None}
    with pytest.raises(WeightsError, match=message):
        static_kv_scales(checkpoint(tmp_path, values), 2)
