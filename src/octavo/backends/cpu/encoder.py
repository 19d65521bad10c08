"""An encoder on the CPU: whole texts in, the vectors of their tokens out; nothing is kept between steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo._native import KvType, Plan
from octavo.backends.cpu.backend import instruction_set, packed_weights, tuned
from octavo.backends.cpu.lowering import BLOCK_SIZE, lower
from octavo.backends.cpu.sizes import step_shape
from octavo.backends.cpu.tiles import TuningUse
from octavo.backends.cpu.tuning_cache import Choices
from octavo.kv_cache import kv_cache_type
from octavo.models.derived import TensorSource
from octavo.models.graph import Graph

__all__ = ["CpuEncoder", "blocks_of"]

Float32Array = NDArray[np.float32]


class CpuEncoder:
    """The plan of an encoder with room for the keys and values of one step."""

    def __init__(self, plan: Plan, *, width: int, max_tokens: int, max_texts: int, max_model_len: int) -> None:
        self.plan = plan
        self.width = width
        self.max_tokens = max_tokens
        self.max_texts = max_texts
        self.max_model_len = max_model_len

    @classmethod
    def load(
        cls,
        graph: Graph,
        source: TensorSource,
        *,
        quantization: str | None,
        max_tokens: int,
        max_texts: int,
        max_model_len: int,
        threads: int,
    ) -> CpuEncoder:
        """Pack the weights and build the plan of a rewritten graph, for steps of so many tokens and texts."""
        shape = step_shape(max_tokens, max_texts, max_model_len)
        lowered = lower(graph, source, quantization=quantization, kv=kv_cache_type("bf16"), shape=shape)
        plan = lowered.build(instruction_set(), threads, packed_weights(lowered, source, quantization, threads))
        plan.make_pool(blocks_of(max_tokens, shape.max_sequences), KvType.BF16)
        return cls(
            plan,
            width=graph.output_width,
            max_tokens=max_tokens,
            max_texts=shape.max_sequences,
            max_model_len=max_model_len,
        )

    def encode(self, texts: Sequence[Sequence[int]], rows: str) -> list[Float32Array]:
        """The vectors [tokens, width] of each text's "first", "last" or "all" tokens.

        At most `max_texts` texts of `max_tokens` tokens together. What comes out for a text does not depend on which
        others are with it.
        """
        plan = self.plan
        at = block = row = 0
        bounds = []
        for index, ids in enumerate(texts):
            count = len(ids)
            plan.tokens[at : at + count] = ids
            plan.starts[index], plan.counts[index] = 0, count
            blocks = -(-count // BLOCK_SIZE)
            plan.block_tables[index, :blocks] = np.arange(block, block + blocks, dtype=np.int32)
            first, stop = {"first": (at, at + 1), "last": (at + count - 1, at + count)}.get(rows, (at, at + count))
            plan.logit_rows[row : row + stop - first] = np.arange(first, stop, dtype=np.int32)
            bounds.append((row, row + stop - first))
            at, block, row = at + count, block + blocks, row + stop - first
        vectors = np.empty((row, self.width), np.float32)
        plan.run(len(texts), row, None, vectors)
        return [vectors[start:stop] for start, stop in bounds]

    def tune(self, choices: Choices, source: str) -> TuningUse:
        """Run with measured tiles where there are any."""
        return tuned(self.plan, choices, source)


def blocks_of(max_tokens: int, max_texts: int) -> int:
    """KV blocks that any step may need: each text may leave one part empty."""
    return -(-max_tokens // BLOCK_SIZE) + max_texts
