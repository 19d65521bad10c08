"""``octavo bench latency``: one stream alone, time to its first token and between tokens."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import TYPE_CHECKING

import typer

from octavo.cli import options as opt
from octavo.cli.bench import common

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("latency")(latency)


def latency(
    model: opt.Model = opt.DEFAULT_MODEL,
    input_len: common.InputLen = 128,
    output_len: common.OutputLen = 128,
    rounds: common.Rounds = 3,
    quantization: opt.QuantizationOption = None,
    threads: opt.Threads = None,
    json: common.AsJson = False,
    profile: common.Profile = False,
) -> None:
    """One request at a time: decode_tok_s, ttft_s, itl_ms."""
    from octavo.benchmarking.record import make_record
    from octavo.cli.bench.record import emit

    llm = common.start(model, quantization, threads, length=input_len + output_len, profile=profile)
    figures = common.measure(llm, rounds, lambda seed: _round(llm, input_len, output_len, seed), profile=profile)
    record = make_record(
        "latency",
        figures,
        threads=threads,
        **common.about_model(model, quantization),
        input_len=input_len,
        output_len=output_len,
    )
    emit(record, as_json=json)


def _round(llm: LLM, input_len: int, output_len: int, seed: int) -> dict[str, float]:
    (prompt,) = common.prompts(llm, 1, input_len, seed=seed)
    began = time.perf_counter()
    # One output a step, and one token a step: the times between outputs are the times between tokens.
    arrivals = [time.perf_counter() for _ in llm.stream(prompt, common.greedy(output_len))]
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    figures = {"ttft_s": arrivals[0] - began}
    if gaps:
        figures["decode_tok_s"] = len(gaps) / (arrivals[-1] - arrivals[0])
        figures["itl_ms"] = statistics.median(gaps) * 1000
    return figures
