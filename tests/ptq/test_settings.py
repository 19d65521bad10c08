"""Settings that contradict each other or a layout are refused by the name of their flag."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.ptq.settings import QuantizeSettings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "rnt"}, "--method must be one of rtn, awq, gptq, smoothquant, got 'rnt'"),
        ({"method": "awq", "format": "onnx"}, "--format must be one of"),
        ({"method": "awq", "format": "awq", "bits": 3}, "--bits must be 4 for the awq layout, got 3"),
        ({"method": "gptq", "bits": 5}, "--bits must be 2 or 3 or 4 or 8"),
        ({"method": "smoothquant", "bits": 4, "group_size": -1}, "--bits must be 8 for smoothquant"),
        ({"method": "smoothquant", "bits": 8, "group_size": -1}, "compressed-tensors layout only"),
        ({"method": "smoothquant", "bits": 8, "format": "compressed-tensors"}, "leave --group-size out"),
        ({"method": "gptq", "static_scales": "mse"}, "--static-scales is of --method smoothquant"),
        ({"method": "awq", "format": "awq", "symmetric": True}, "always has zero points"),
        ({"method": "gptq", "group_size": 20}, "--group-size must be -1"),
        ({"method": "gptq", "damping": 2.0}, "--damping must be from 0 to 1"),
        ({"method": "gptq", "samples": 0}, "--samples"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantizeSettings(**values)


def test_every_setting_counts_for_the_fingerprint() -> None:
    one = QuantizeSettings(method="gptq")
    assert one.fingerprint("a") == QuantizeSettings(method="gptq").fingerprint("a")
    assert one.fingerprint("a") != one.fingerprint("b")
    assert one.fingerprint("a") != QuantizeSettings(method="gptq", damping=0.02).fingerprint("a")
