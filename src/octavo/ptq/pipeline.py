"""A checkpoint quantised layer by layer: one layer's weights and the calibration's activations in memory at a time."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError, ModelError
from octavo.evaluation.texts import Text, beginning
from octavo.models.derived import Derived, derived_source
from octavo.models.nodes import Value
from octavo.models.registry import build_graph, check_weights, fit_names
from octavo.ptq.calibration import CalibrationRun, calibration_sequences
from octavo.ptq.formats.awq import AwqLayout
from octavo.ptq.formats.compressed_tensors import CompressedTensorsLayout
from octavo.ptq.formats.gptq import GptqLayout
from octavo.ptq.formats.layout import Layout, WrittenTensor
from octavo.ptq.grid import Float32Array
from octavo.ptq.layer import LayerResult, quantize_layer
from octavo.ptq.linears import LayerPlan, layer_plans
from octavo.ptq.settings import QuantizeSettings
from octavo.ptq.smoothquant import AbsHistogram
from octavo.ptq.state import WorkState
from octavo.ptq.statistics import InputStatistics
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from octavo.weights.safetensors_writing import OutgoingTensor, write_sharded
from octavo.weights.tensors import DenseTensor

__all__ = ["Progress", "quantize_checkpoint"]

Progress = Callable[[int, int, str], None]
"""Told the finished layers, how many there are, and how it stands."""

_COPIED = {".json", ".txt", ".model", ".jinja", ".tiktoken"}
_LARGEST_COPIED = 64 << 20


def quantize_checkpoint(
    model: Path, out: Path, settings: QuantizeSettings, text: Text | None, progress: Progress | None = None
) -> dict[str, Any]:
    """Quantise the directory ``model`` into ``out`` and return what there is to report of it.

    ``text`` is what it is calibrated with (None: a method that needs none). Layers that an earlier run finished in
    ``out`` with the same settings are not done again. Raises ConfigError for what cannot be written in the layout asked
    for, ModelError and WeightsError for a model that cannot be read.
    """
    checkpoint = open_checkpoint(model)
    try:
        return _Run(model, out, settings, text, checkpoint, progress or _silent).run()
    finally:
        checkpoint.close()


class _Run:
    def __init__(
        self,
        model: Path,
        out: Path,
        settings: QuantizeSettings,
        text: Text | None,
        checkpoint: Checkpoint,
        progress: Progress,
    ) -> None:
        if checkpoint.format != "safetensors":
            raise ConfigError(f"{model}: is not a directory with safetensors files, which is what can be quantised")
        self.model, self.out, self.settings, self.text = model, out, settings, text
        self.checkpoint, self.progress = checkpoint, progress
        self.graph = fit_names(build_graph(checkpoint.config), checkpoint.names())
        check_weights(self.graph, checkpoint)
        self.tensors = derived_source(checkpoint, self.graph.derived)
        self.plans = layer_plans(self.graph)
        self.layout = _layout(settings, checkpoint.config)
        self.matrices = {name for plan in self.plans for name in plan.weights}
        self._check()

    def _check(self) -> None:
        """Refuse what the layout cannot hold before anything is computed."""
        for plan in self.plans:
            for group in plan.groups:
                size = self.settings.group_size
                for name in group.weights:
                    tensor = self.checkpoint.tensor(name)
                    if not isinstance(tensor, DenseTensor) or len(tensor.shape) != 2 or not name.endswith(".weight"):
                        raise ModelError(f"tensor {name}: is not a plain matrix of floating point numbers")
                    if size != -1 and group.k % size:
                        possible = [each for each in (32, 64, 96, 128, 192, 256) if self._divides(each)]
                        raise ConfigError(
                            f"tensor {name}: its {group.k} inputs do not divide into groups of {size}; "
                            f"--group-size may be {', '.join(map(str, possible)) or '-1'} for this model"
                        )
                    self.layout.check(name, (tensor.shape[0], tensor.shape[1]), group.k if size == -1 else size)

    def _divides(self, size: int) -> bool:
        return all(group.k % size == 0 for plan in self.plans for group in plan.groups)

    def run(self) -> dict[str, Any]:
        began = time.monotonic()
        sequences = self._sequences()
        words = hashlib.sha256(np.array([token for ids in sequences for token in ids], "<i4").tobytes()).hexdigest()
        state = WorkState(self.out, self.settings.fingerprint(_sources(self.model), words))
        taken_up = state.finished
        run = CalibrationRun(self.graph, sequences)
        if sequences and not taken_up:
            first = self.plans[0].nodes[0]
            before = self.graph.nodes[: self.graph.nodes.index(first)]
            run.advance(before, self._outside_weight)
        elif sequences:
            run.restore(state.activations())
        self.progress(taken_up, len(self.plans), "taken up again" if taken_up else "")
        for plan in self.plans[taken_up:]:
            self._layer(plan, run, state)
            errors = state.layers[-1]["errors"]
            worst = max(errors, key=lambda name: errors[name])
            self.progress(state.finished, len(self.plans), f"worst {worst.removesuffix('.weight')} {errors[worst]:.2e}")
        written = self._write(state)
        layers = state.layers
        state.remove()
        return {
            "method": self.settings.method,
            "tokens": sum(map(len, sequences)),
            "sequences": len(sequences),
            "layers": [{name: layer[name] for name in ("layer", "errors", "factors", "seconds")} for layer in layers],
            "source_bytes": sum(path.stat().st_size for path in self.model.glob("*.safetensors")),
            "bytes": sum(path.stat().st_size for path in written),
            "seconds": time.monotonic() - began,
            "taken_up_layers": taken_up,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def _sequences(self) -> list[list[int]]:
        if self.text is None:
            return []
        from octavo.frontend.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self.checkpoint)
        ids = list(tokenizer.encode(self.text.content, add_special_tokens=False))
        prefix = beginning(lambda part: list(tokenizer.encode(part)))
        plain = beginning(lambda part: list(tokenizer.encode(part, add_special_tokens=False)))
        if plain and prefix[-len(plain) :] == plain:
            prefix = prefix[: -len(plain)]
        return calibration_sequences(ids, self.settings.samples, self.settings.seq_len, prefix)

    def _layer(self, plan: LayerPlan, run: CalibrationRun, state: WorkState) -> None:
        began = time.monotonic()
        weights = {name: self._read(name) for name in plan.weights}
        vectors = {
            name: self._read(name)
            for group in plan.groups
            if group.absorber is not None
            for name in (*group.absorber.vectors, group.absorber.bias)
            if name is not None
        }
        statistics: dict[Value, InputStatistics] = {}
        if run.sequences:
            full = self.settings.method != "smoothquant"
            statistics = {group.value: InputStatistics(group.k, moments=full) for group in plan.groups}
            run.observe(plan.nodes, self._weights(weights), lambda value, x: _add(statistics, value, x))
        result = quantize_layer(plan, weights, vectors, statistics, self.settings, self.layout.scale_dtype)
        rounded = {name: matrix.dequantized() for name, matrix in result.matrices.items()}
        histograms: dict[Value, AbsHistogram] = {}
        if self.settings.static_scales is not None:
            histograms = {group.value: AbsHistogram() for group in plan.groups}
        if run.sequences:
            run.advance(
                plan.nodes,
                self._weights(rounded | result.vectors),
                lambda value, x: histograms[value].add(x) if value in histograms else None,
            )
        about = {
            "layer": plan.layer,
            "errors": result.errors,
            "factors": result.factors,
            "seconds": time.monotonic() - began,
        }
        state.finish_layer(self._packed(plan, result, histograms), about, run.arrays())

    def _packed(
        self, plan: LayerPlan, result: LayerResult, histograms: Mapping[Value, AbsHistogram]
    ) -> dict[str, WrittenTensor]:
        tensors: dict[str, WrittenTensor] = {}
        for group in plan.groups:
            scale = None
            if group.value in histograms:
                kind = self.settings.static_scales or "max"
                scale = histograms[group.value].scale(kind, self.settings.percentile)
            for name in group.weights:
                tensors.update(self.layout.pack(name, result.matrices[name], scale))
        # In float32, so that no factor is rounded a second time.
        tensors.update({name: WrittenTensor("F32", vector) for name, vector in result.vectors.items()})
        return tensors

    def _read(self, name: str) -> Float32Array:
        tensor = self.tensors.tensor(name)
        values = np.array(tensor.read_f32(), np.float32)
        tensor.release()
        return values

    def _weights(self, held: Mapping[str, Float32Array]) -> Callable[[str], Float32Array]:
        """The weights nodes read, of the tensors at hand and the others of the checkpoint."""
        return _Weights(held, self.graph.derived, self._read)

    def _outside_weight(self, name: str) -> Any:
        """A weight outside of the layers: of an embedding only the rows that are read."""
        tensor = self.tensors.tensor(name)
        return _PickedRows(tensor) if len(tensor.shape) == 2 else self._read(name)

    def _write(self, state: WorkState) -> list[Path]:
        made = list(state.tensors())
        names = {tensor.name for tensor in made}
        kept = [name for name in self.checkpoint.names() if name not in names and name not in self.matrices]
        written = write_sharded(self.out, [*made, *(self._copied(name) for name in kept)])
        for path in sorted(self.model.iterdir()):
            copied = path.suffix in _COPIED or path.name.startswith(("LICENSE", "NOTICE"))
            own = path.name == "config.json" or path.name.endswith(".safetensors.index.json")
            if path.is_file() and copied and not own and path.stat().st_size <= _LARGEST_COPIED:
                shutil.copyfile(path, self.out / path.name)
        ignored = sorted({name.removesuffix(".weight") for name in ("lm_head.weight",) if name not in self.matrices})
        quantization = self.layout.config(self.settings, ignored)
        config = {**self.checkpoint.config, "quantization_config": quantization}
        if self.layout.torch_dtype is not None:
            config["torch_dtype"] = self.layout.torch_dtype
            if "dtype" in config:
                config["dtype"] = self.layout.torch_dtype
        _write_json(self.out / "config.json", config)
        if self.settings.format == "gptq":
            _write_json(self.out / "quantize_config.json", quantization)
        return written

    def _copied(self, name: str) -> OutgoingTensor:
        tensor = self.checkpoint.tensor(name)
        stored = tensor.stored_rows()
        if stored is None:
            raise ModelError(f"tensor {name}: its bytes are not in the file as they are")
        data = stored.bytes
        return OutgoingTensor(name, stored.kind, tuple(tensor.shape), lambda: [data])


def _layout(settings: QuantizeSettings, config: Mapping[str, Any]) -> Layout:
    if settings.format == "gptq":
        return GptqLayout(settings.bits)
    if settings.format == "awq":
        return AwqLayout()
    half = config.get("torch_dtype", config.get("dtype")) == "float16"
    integers = settings.method == "smoothquant"
    return CompressedTensorsLayout(settings.bits, "f16" if half else "bf16", integers=integers)


def _silent(finished: int, total: int, state: str) -> None:
    """Tell nobody."""


class _Weights:
    """Weights by name: those at hand, else read."""

    def __init__(
        self, held: Mapping[str, Float32Array], derived: Mapping[str, Derived], read: Callable[[str], Float32Array]
    ) -> None:
        self._held, self._derived, self._read = dict(held), derived, read

    def __call__(self, name: str) -> Float32Array:
        if name not in self._held:
            view = self._derived.get(name)
            known = view is not None and view.source in self._held
            self._held[name] = view.array(self._held[view.source]) if view and known else self._read(name)
        return self._held[name]


class _PickedRows:
    """A matrix of which only rows that are asked for are read."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getitem__(self, rows: NDArray[np.int64]) -> Float32Array:
        unique, places = np.unique(rows, return_inverse=True)
        read = np.concatenate([self._tensor.read_f32(int(row), int(row) + 1) for row in unique])
        picked: Float32Array = read[places]
        return picked


def _add(statistics: Mapping[Value, InputStatistics], value: Value, x: Float32Array) -> None:
    if value in statistics:
        statistics[value].add(x)


def _sources(model: Path) -> str:
    """What tells one model from another: names, sizes and times of its weight files."""
    files: Sequence[Path] = sorted(model.glob("*.safetensors"))
    return json.dumps([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files])


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
