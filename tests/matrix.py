"""Family x weight format x KV type: a tiny model of each family is run in every one, and each cell proven or refused.

Proven means: the logits are finite, the same bits whatever the steps, and as near to those of float32 arithmetic on the
same (dequantised) weights as the format's rounding allows. `scripts/matrix-page` runs all of it and writes the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from octavo.backends.cpu import CpuBackend
from octavo.backends.cpu.forms import QUANTIZATIONS
from octavo.errors import OctavoError
from octavo.kv_cache import KV_CACHE_DTYPES, kv_cache_type
from octavo.models.graph import Graph, Linear
from octavo.models.mixture import MoeExperts
from octavo.models.registry import build_graph, check_weights, fit_names
from octavo.models.rewrites import optimize
from octavo.weights.checkpoint import open_checkpoint
from tests.backends.cpu import test_quantized_models as stored
from tests.backends.cpu.emulation import relative_error
from tests.models.tiny import random_tokens
from tests.weights import layouts
from tests.weights.layouts import Array

__all__ = ["FORMATS", "KV_TYPES", "Cell", "cells_of"]

TOKENS = 24
# Other names of the same types are left out.
_KV_NAMES = [name for name in KV_CACHE_DTYPES if name != "auto"]
KV_TYPES = tuple(
    name
    for index, name in enumerate(_KV_NAMES)
    if kv_cache_type(name) not in [kv_cache_type(earlier) for earlier in _KV_NAMES[:index]]
)

_IN_GROUPS = {"bits": 4, "group_size": 32}
_FLOAT8 = {"quant_method": "fp8"}


def _awq(name: str, weights: Array) -> dict[str, Any]:
    return layouts.awq(name, *stored.rounded(weights, 4, np.arange(weights.shape[1]) // 32))


@dataclass(frozen=True)
class Format:
    """A weight format: asked for while loading, or written by `quantise` as its own library does."""

    quantization: str | None = None
    quantise: stored.Quantise | None = None
    config: dict[str, Any] | None = None


FORMATS: dict[str, Format] = {
    "as stored": Format(),
    **{name: Format(name) for name in QUANTIZATIONS if name not in (None, "none", "f32")},
    "AWQ": Format(None, _awq, {"quant_method": "awq", **_IN_GROUPS}),
    "GPTQ": Format(None, stored.gptq, {"quant_method": "gptq", **_IN_GROUPS}),
    "LLM.int8": Format(None, stored.llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "NF4": Format(None, stored.nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "W8A8": Format(
        None,
        stored.int8,
        {"quant_method": "compressed-tensors", "config_groups": stored.config_groups(num_bits=8, type="int")},
    ),
    "FP8": Format(None, stored.fp8, _FLOAT8),
    "FP8 blocks": Format(None, stored.fp8_blocks, {**_FLOAT8, "weight_block_size": [128, 128]}),
}


@dataclass(frozen=True)
class Cell:
    """One combination: `refusal` is why it is refused, None when it is proven."""

    format: str
    kv: str
    refusal: str | None


class NotProvenError(Exception):
    """A combination runs and is wrong."""


def cells_of(folder: Path, work: Path) -> Iterator[Cell]:
    """Every cell of the tiny model in `folder`; NotProvenError where one is wrong."""
    for name, form in FORMATS.items():
        try:
            model = folder if form.quantise is None else _quantised(folder, work / name.replace(" ", "-"), form)
            run = _Model(model, form.quantization)
            run.check_form(name)
        except OctavoError as error:
            reason = _reason(error, folder)
            yield from (Cell(name, kv, reason) for kv in KV_TYPES)
            continue
        for kv in KV_TYPES:
            try:
                run.check_kv(name, kv)
            except OctavoError as error:
                yield Cell(name, kv, _reason(error, folder))
            else:
                yield Cell(name, kv, None)


def _reason(error: OctavoError, folder: Path) -> str:
    """Why, without the name of the one tensor it was found by."""
    text = re.sub(r"^tensors? \S+: ", "a tensor ", str(error).replace(str(folder), ""))
    return " ".join(text.split())


# What 4-bit keys and values of 24 tokens may change the logits of a tiny random model by; the others are far below.
_KV_LIMIT = 0.6


class _Model:
    """A tiny model in one format."""

    def __init__(self, folder: Path, quantization: str | None) -> None:
        self.checkpoint = open_checkpoint(folder)
        graph = fit_names(optimize(build_graph(self.checkpoint.config)), self.checkpoint.names())
        check_weights(graph, self.checkpoint)
        self.graph: Graph = graph
        self.quantization = quantization
        self.tokens = random_tokens(TOKENS, self.checkpoint.config["vocab_size"])
        self.mixture = any(isinstance(node, MoeExperts) for node in graph.nodes)

    def logits(self, quantization: str | None, kv: str, step: int = 32, threads: int = 2) -> Array:
        backend = CpuBackend.load(
            self.graph,
            self.checkpoint,
            quantization=quantization,
            kv_cache_dtype=kv,
            max_num_batched_tokens=step,
            max_num_seqs=2,
            max_model_len=48,
            num_blocks=1,
            threads=threads,
        )
        found = backend.prompt_logits(self.tokens)
        backend.close()
        return found

    def check_form(self, name: str) -> None:
        """The form itself, keys and values in float32; one made while loading also loses by rounding weights."""
        self.exact = self.logits(self.quantization, "f32")
        limit = {"w4": 1.0, "w8": 0.15, "fp": 0.3}.get((self.quantization or "")[:2], 0.06)
        self._near(f"{name}, f32", self.exact, self.logits("f32", "f32"), limit)

    def check_kv(self, name: str, kv: str) -> None:
        """Keys and values in a type: near to those in float32, and the same bits in small steps."""
        found = self.logits(self.quantization, kv)
        self._near(f"{name}, {kv}", found, self.exact, _KV_LIMIT)
        chunked = self.logits(self.quantization, kv, step=5, threads=1)
        if not np.array_equal(chunked.view(np.uint32), found.view(np.uint32)):
            raise NotProvenError(f"{self.graph.architecture}, {name}, {kv}: bits depend on the size of steps")

    def _near(self, what: str, found: Array, expected: Array, limit: float) -> None:
        if not np.isfinite(found).all():
            raise NotProvenError(f"{self.graph.architecture}, {what}: logits are not finite")
        # In a mixture experts of close scores change places, which later rows see in their keys and values: the best
        # row counts.
        rows = [relative_error(*row) for row in zip(found, expected, strict=True)]
        error = min(rows) if self.mixture else relative_error(found, expected)
        if error > limit:
            raise NotProvenError(f"{self.graph.architecture}, {what}: logits are off by {error:.2g}, limit {limit}")


def _quantised(folder: Path, target: Path, form: Format) -> Path:
    """The model with the matrices of its linears and experts as a format of others stores them."""
    assert form.quantise is not None
    config = json.loads((folder / "config.json").read_text())
    graph = build_graph(config)
    tensors: dict[str, Array] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    graph = fit_names(graph, tensors)
    head = graph.head
    widths = graph.widths()
    wanted = set()
    for node in graph.nodes:
        # Routers stay as they are in every format.
        routes = isinstance(node, Linear) and node.precise
        if isinstance(node, Linear | MoeExperts) and node.output != head and not routes:
            for name in node.weight_shapes(tuple(widths[value] for value in node.inputs())):
                view = graph.derived.get(name)
                wanted.add(name if view is None else view.source)
    written: dict[str, Any] = {}
    for name, values in tensors.items():
        base = name.removesuffix(".weight")
        # Formats in groups of 32 cannot hold the narrowest matrices of tiny models: those stay as they are too.
        fits = values.ndim == 2 and values.shape[0] % 8 == 0 and values.shape[1] % 32 == 0
        if name in wanted and base != name and fits:
            written |= form.quantise(base, np.ascontiguousarray(values, np.float32))
        else:
            written[name] = values
    return layouts.write_model(target, written, {**config, "quantization_config": form.config})
