"""Small weights quantised by the formats' own libraries are read as these dequantise them, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from octavo.weights import open_checkpoint
from tests.weights import layouts

FILES = sorted((Path(__file__).parents[1] / "golden/quantized").glob("*.safetensors"))
# Where the library rounds in the middle, or in another order, than one product of code and scale: units in the last
# place of its own dtype that may differ.
STEPS = {"bnb_int8": 1}
# HQQ subtracts zero points and multiplies in f16: what it rounds is as large as the largest code.
SPREAD = {"hqq_2": 3, "hqq_3": 7, "hqq_4": 15, "hqq_8": 255}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_values_are_those_of_the_library(tmp_path: Path, path: Path) -> None:
    with safe_open(path, "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - it is no mapping
        config = json.loads(stored.metadata()["quantization_config"])
    expected = tensors.pop("expected")
    checkpoint = open_checkpoint(layouts.write_model(tmp_path, tensors, {"quantization_config": config}))
    assert checkpoint.names() == ["x.weight"]
    found = torch.from_numpy(checkpoint.tensor("x.weight").read_f32().copy())
    assert found.shape == expected.shape
    # Rounded as the library rounds what it gives.
    own = found.to(expected.dtype)
    allowed = STEPS.get(path.stem, 0) * torch.finfo(expected.dtype).eps * expected.abs().float()
    if path.stem in SPREAD:
        allowed = torch.finfo(expected.dtype).eps * SPREAD[path.stem] * tensors["x.scale"].float().max()
    difference = (own.float() - expected.float()).abs()
    assert (difference <= allowed).all(), difference.max()
    assert np.isfinite(found.numpy()).all()
