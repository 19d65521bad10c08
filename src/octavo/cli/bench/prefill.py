"""``octavo bench prefill``: how fast a prompt is read."""

from __future__ import annotations

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
    app.command("prefill")(prefill)


def prefill(
    model: opt.Model = opt.DEFAULT_MODEL,
    input_len: common.InputLen = 1024,
    rounds: common.Rounds = 3,
    quantization: opt.QuantizationOption = None,
    threads: opt.Threads = None,
    json: common.AsJson = False,
    profile: common.Profile = False,
) -> None:
    """One long prompt and one token: prefill_tok_s, prefill_s."""
    from octavo.benchmarking.record import make_record
    from octavo.cli.bench.record import emit

    llm = common.start(model, quantization, threads, length=input_len + 1, profile=profile)
    figures = common.measure(llm, rounds, lambda seed: _round(llm, input_len, seed), profile=profile)
    record = make_record(
        "prefill",
        figures,
        threads=threads,
        **common.about_model(model, quantization),
        input_len=input_len,
    )
    emit(record, as_json=json)


def _round(llm: LLM, input_len: int, seed: int) -> dict[str, float]:
    work = common.prompts(llm, 1, input_len, seed=seed)
    began = time.perf_counter()
    llm.generate(work, common.greedy(1), use_tqdm=False)
    seconds = time.perf_counter() - began
    return {"prefill_tok_s": input_len / seconds, "prefill_s": seconds}
