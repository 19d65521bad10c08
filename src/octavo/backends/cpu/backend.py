"""The back end the engine drives: fills a step's arrays, makes one native call, reads what was sampled."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo._native import KvType, PackedWeight, Plan, Sampler, available_levels
from octavo.backends.cpu.built import attach_weights
from octavo.backends.cpu.forms import is_lossy
from octavo.backends.cpu.lowering import BLOCK_SIZE, Lowered, WeightSource, lower
from octavo.backends.cpu.operations import OperationProfile
from octavo.backends.cpu.packing import pack_all
from octavo.backends.cpu.sizes import step_shape
from octavo.backends.cpu.tiles import TuningUse, apply_tiles
from octavo.backends.cpu.tuning_cache import Choices, warn_damaged
from octavo.backends.interface import SampledToken, StepBatch, StepOutput, StepTimes, step_kind
from octavo.errors import ConfigError, ParameterError
from octavo.kv_cache import kv_cache_type
from octavo.models.graph import Graph
from octavo.sampling.rows import SamplerBatch
from octavo.weights.built import BuiltCheckpoint
from octavo.weights.tensors import DenseTensor

__all__ = ["CpuBackend", "instruction_set", "packed_weights", "tuned"]

Float32Array = NDArray[np.float32]
KvScales = Sequence[tuple[float, float]]
_KV_TYPES = {
    "bf16": KvType.BF16,
    "f16": KvType.F16,
    "f32": KvType.F32,
    "fp8_e4m3": KvType.E4M3,
    "fp8_e5m2": KvType.E5M2,
    "fp8_per_token_head": KvType.E4M3Scaled,
    "int8": KvType.I8,
    "int4": KvType.I4,
}
_PREFAULT = 512 << 20  # bytes: what 64 requests of 300 tokens take in a small model
_log = logging.getLogger(__name__)


def instruction_set() -> str:
    """The instruction-set level in use: the best this machine runs, or what OCTAVO_ISA asks for."""
    levels = available_levels()
    wanted = os.environ.get("OCTAVO_ISA", "")
    if wanted and wanted not in levels:
        raise ConfigError(f"OCTAVO_ISA is {wanted!r}; this build and machine have {', '.join(levels)}")
    return wanted or str(levels[-1])


class CpuBackend:
    """A model on the CPU, over a paged KV cache of `num_blocks` blocks of 16 tokens."""

    block_size = BLOCK_SIZE

    def __init__(
        self,
        plan: Plan,
        *,
        num_blocks: int,
        vocab_size: int,
        max_model_len: int,
        max_rows: int,
        arithmetic: Mapping[str, str] | None = None,
    ) -> None:
        self.plan = plan
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._sampler = Sampler(vocab_size, max_rows, vocab_size, plan.threads, plan.level)
        self._rows = SamplerBatch(self._sampler)
        self._max_rows = max_rows
        self._operations = OperationProfile(plan, arithmetic or {})
        self._tokens, self._starts, self._counts = plan.tokens, plan.starts, plan.counts
        self._tables, self._logit_rows = plan.block_tables, plan.logit_rows

    @classmethod
    def load(
        cls,
        graph: Graph,
        source: WeightSource,
        *,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        kv_scales: KvScales = (),
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 64,
        max_model_len: int,
        num_blocks: int,
        threads: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> CpuBackend:
        """Pack the weights (or map those of a built model) and build the plan of a rewritten graph.

        `meanwhile` is called while they are packed. `kv_scales`: of keys and values of each layer, for a
        `kv_cache_dtype` that takes them; else they are 1.
        """
        shape = step_shape(max_num_batched_tokens, max_num_seqs, max_model_len)
        kv = kv_cache_type(kv_cache_dtype)
        lowered = lower(graph, source, quantization=quantization, kv=kv, shape=shape)
        with ThreadPoolExecutor(1, thread_name_prefix="octavo-load") as helper:
            packing = helper.submit(packed_weights, lowered, source, quantization, threads)
            if meanwhile is not None:
                meanwhile()
            weights = packing.result()
        plan = lowered.build(instruction_set(), threads, weights)
        # Blocks past the engine's own serve prompt_logits; like all of the pool they take memory only once written.
        scales = np.array(kv_scales, np.float32).reshape(-1) if kv.static and kv_scales else None
        plan.make_pool(num_blocks + shape.max_blocks, _KV_TYPES[kv.name], scales)
        return cls(
            plan,
            num_blocks=num_blocks,
            vocab_size=graph.vocab_size,
            max_model_len=max_model_len,
            max_rows=max_num_batched_tokens,
            arithmetic=lowered.arithmetic,
        )

    def execute(self, batch: StepBatch) -> StepOutput:
        """Run one step; see `octavo.backends.interface.Backend`."""
        began = perf_counter()
        if batch.copies:
            self.plan.copy_blocks(np.array(batch.copies, np.int32).reshape(-1, 2))
        tokens, tables, logit_rows, rows = self._tokens, self._tables, self._logit_rows, self._rows
        token = 0
        starts, counts, ends = [], [], []
        sampled: list[int] = []
        scored = False
        for index, work in enumerate(batch.work):
            start, count = work.start, work.count
            end = start + count
            if count == 1:
                tokens[token] = work.token_ids[start]
            else:
                tokens[token : token + count] = work.token_ids[start:end]
            blocks = (end + BLOCK_SIZE - 1) // BLOCK_SIZE
            tables[index, :blocks] = work.block_table[:blocks]
            token += count
            starts.append(start)
            counts.append(count)
            ends.append(token)
            if work.sample:
                sampled.append(index)
            scored |= work.prompt_logprobs
        sequences = len(starts)
        self._starts[:sequences] = starts
        self._counts[:sequences] = counts
        filled = perf_counter()
        rows.begin()
        row = 0
        if scored:
            row = self._bind_scored(batch, ends)
        else:
            for index in sampled:
                work = batch.work[index]
                assert work.row is not None
                logit_rows[row] = ends[index] - 1
                rows.fill(row, work.row, work.start + work.count)
                row += 1
        if self._operations.on:
            self._operations.enter(step_kind(batch.decodes, sequences))
        bound = perf_counter()
        self.plan.run(sequences, row, self._sampler)
        ran = perf_counter()
        results = rows.results(row)
        if scored:
            output = _with_prompt_rows(batch, results)
        elif row == sequences:
            output = StepOutput(list(results))
        else:
            found: list[SampledToken | None] = [None] * sequences
            for index, result in zip(sampled, results, strict=True):
                found[index] = result
            output = StepOutput(found)
        output.times = StepTimes(filled - began, bound - filled, ran - bound, perf_counter() - ran)
        return output

    def _bind_scored(self, batch: StepBatch, ends: list[int]) -> int:
        """Write the rows of a step some of whose sequences have prompt tokens scored; how many there are."""
        rows, logit_rows = self._rows, self._logit_rows
        row = 0
        for work, last in zip(batch.work, ends, strict=True):
            if work.prompt_logprobs:
                assert work.row is not None
                wanted, top = work.count - (1 if work.sample else 0), work.row.num_prompt_top or 0
                for i in range(wanted):
                    logit_rows[row] = last - work.count + i
                    rows.fill_prompt_row(row, int(work.token_ids[work.start + i + 1]), top)
                    row += 1
            if work.sample:
                assert work.row is not None
                logit_rows[row] = last - 1
                rows.fill(row, work.row, work.start + work.count)
                row += 1
        return row

    def prompt_logits(self, token_ids: Sequence[int]) -> Float32Array:
        """Raw logits [n, vocab] after every position of a prompt; the KV cache of the engine is not touched."""
        n = len(token_ids)
        if not 1 <= n <= self.max_model_len:
            raise ParameterError("prompt_token_ids", n, f"1 to {self.max_model_len} tokens")
        logits = np.empty((n, self.vocab_size), np.float32)
        ids = np.asarray(token_ids, np.int32)
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if wrong.size:
            raise ParameterError("prompt_token_ids", int(wrong[0]), f"token ids from 0 to {self.vocab_size - 1}")
        blocks = self._tables.shape[1]
        self._tables[0, :] = np.arange(self.num_blocks, self.num_blocks + blocks, dtype=np.int32)
        step = self._tokens.shape[0]
        for start in range(0, n, step):
            count = min(step, n - start)
            self._tokens[:count] = ids[start : start + count]
            self._starts[0], self._counts[0] = start, count
            self._logit_rows[:count] = np.arange(count)
            if self._operations.on:
                self._operations.enter("prefill")
            self.plan.run(1, count, None, logits[start : start + count])
        return logits

    def tune(self, choices: Choices, source: str) -> TuningUse:
        """Run with measured tiles where there are any; all or none of a file, should one not fit."""
        return tuned(self.plan, choices, source)

    def prefault(self, nbytes: int | None) -> None:
        """Have the KV blocks that are used first given memory in the background; see `kv_prefault_bytes`.

        On a virtual machine whose host has no memory ready for it this took 1.3 s for 512 MB, a sixth of the work of
        filling them.
        """
        pool = self.plan.block_bytes * self.num_blocks
        self.plan.prefault_pool(min(_PREFAULT, pool // 4) if nbytes is None else min(nbytes, pool))

    @property
    def prefaulted(self) -> bool:
        """Whether that is over."""
        return self.plan.pool_prefaulted

    def set_profiling(self, on: bool) -> None:
        """Measure every native operation from now on, or stop; clears what was measured."""
        self._operations.switch(on)

    def profile(self, step: str | None = None) -> list[dict[str, Any]]:
        """Time, share and rates per kind of operation since profiling was switched on, most expensive first.

        Of all steps, or of those of one kind: "prefill", "decode" or "mixed".
        """
        return self._operations.rows(step)

    def close(self) -> None:
        """Let go of the plan; its memory is freed with the last reference to it."""
        for name in ("plan", "_operations", "_tokens", "_starts", "_counts", "_tables", "_logit_rows"):
            self.__dict__.pop(name, None)


def tuned(plan: Plan, choices: Choices, source: str) -> TuningUse:
    """Have a plan run with the measured tiles of a file, all or none of them."""
    try:
        return apply_tiles(plan, choices, source)
    except ValueError as error:
        warn_damaged(source, error)
        return apply_tiles(plan, {})


def packed_weights(
    lowered: Lowered, source: WeightSource, quantization: str | None, threads: int
) -> list[PackedWeight]:
    """The weights of a lowered graph, packed, or mapped from a built model; says which run otherwise than stored."""
    _report_forms(lowered)
    if quantization is None:
        _report_losses(lowered)
    elif quantization == "w8-wide":
        _report_narrow(lowered)
    if isinstance(source, BuiltCheckpoint):
        return attach_weights(lowered.packings, source, threads)
    return pack_all(lowered.packings, threads)


def _report_forms(lowered: Lowered) -> None:
    """Say what the weights run as: tensors of each kind, bits a weight and bytes, scales and padding included."""
    count: Counter[tuple[str, str]] = Counter()
    weights: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    for packing in lowered.packings:
        rows = sum(tensor.shape[0] for tensor in packing.tensors)
        for tensor in packing.tensors:
            stored = tensor.dtype if isinstance(tensor, DenseTensor) else tensor.source
            key = stored, f"{packing.form}{', rounded' if is_lossy(tensor, packing.form) else ''}"
            count[key] += 1
            weights[key] += tensor.shape[0] * tensor.shape[1]
            size[key] += packing.nbytes * tensor.shape[0] // rows
    for key, tensors in count.items():
        _log.info(
            "weights: %d tensors stored as %s run as %s: %.2f bits a weight, %s bytes",
            tensors, *key, 8 * size[key] / weights[key], f"{size[key]:,}",
        )  # fmt: skip


def _report_losses(lowered: Lowered) -> None:
    """Say which tensors do not run as they are in the file, though nobody asked for another form."""
    losses: Counter[tuple[str, str]] = Counter()
    for packing in lowered.packings:
        for tensor in packing.tensors:
            if is_lossy(tensor, packing.form):
                stored = tensor.dtype if isinstance(tensor, DenseTensor) else tensor.source
                losses[stored, str(packing.form)] += 1
    for (stored, form), count in losses.items():
        _log.warning("weights: %d tensors stored as %s are rounded to %s", count, stored, form)


def _report_narrow(lowered: Lowered) -> None:
    """Say which tensors run in narrower groups than were asked for."""
    narrow = Counter(str(packing.form) for packing in lowered.packings if not packing.form.wide)
    for form, count in narrow.items():
        _log.warning("weights: %d linears have no wide groups (by their width or own codes) and run as %s", count, form)


def _with_prompt_rows(batch: StepBatch, results: list[SampledToken]) -> StepOutput:
    """Results of a step some of whose sequences had prompt tokens scored, in the order rows were filled."""
    sampled: list[SampledToken | None] = []
    prompts: list[list[SampledToken] | None] = []
    row = 0
    for work in batch.work:
        wanted = work.count - (1 if work.sample else 0) if work.prompt_logprobs else 0
        prompts.append(results[row : row + wanted] if work.prompt_logprobs else None)
        row += wanted
        sampled.append(results[row] if work.sample else None)
        row += 1 if work.sample else 0
    return StepOutput(sampled, prompts)
