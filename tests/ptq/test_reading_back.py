"""What `octavo quantize` writes in the layouts of others is read as octavo reads theirs, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.ptq.formats.awq import AwqLayout
from octavo.ptq.formats.compressed_tensors import CompressedTensorsLayout
from octavo.ptq.formats.gptq import GptqLayout
from octavo.ptq.formats.layout import Layout
from octavo.ptq.grid import GridSpec
from octavo.weights import open_checkpoint
from tests.ptq.test_formats import matrix
from tests.weights import layouts


def groups(bits: int, **weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"weights": {"num_bits": bits, "type": "int", **weights}}}}


@pytest.mark.parametrize(
    ("layout", "spec", "config"),
    [
        (AwqLayout(), GridSpec(4, 32), {"quant_method": "awq", "bits": 4, "group_size": 32}),
        (GptqLayout(3), GridSpec(3, 32, least_zero=1), {"quant_method": "gptq", "bits": 3, "group_size": 32}),
        (GptqLayout(4), GridSpec(4, 96, True), {"quant_method": "gptq", "bits": 4, "group_size": -1}),
        (
            CompressedTensorsLayout(4, "f16", integers=False),
            GridSpec(4, 32),
            {"quant_method": "compressed-tensors", "format": "pack-quantized", **groups(4)},
        ),
        (
            CompressedTensorsLayout(8, "f16", integers=True),
            GridSpec(8, 96, True),
            {"quant_method": "compressed-tensors", "format": "int-quantized", **groups(8)},
        ),
    ],
    ids=["awq", "gptq 3", "gptq rows", "packed", "int8"],
)
def test_values_are_those_of_the_codes(tmp_path: Path, layout: Layout, spec: GridSpec, config: dict[str, Any]) -> None:
    quantised = matrix(spec)
    written = layout.pack("x.weight", quantised, None)
    stored = {name: torch.from_numpy(np.array(tensor.values, order="C")) for name, tensor in written.items()}
    checkpoint = open_checkpoint(layouts.write_model(tmp_path, stored, {"quantization_config": config}))
    assert checkpoint.names() == ["x.weight"]
    np.testing.assert_array_equal(checkpoint.tensor("x.weight").read_f32(), quantised.dequantized())
