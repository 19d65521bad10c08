"""``octavo bench throughput``: many requests at once, all submitted at the start."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli import options as opt
from octavo.cli.bench import common

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("throughput")(throughput)


def throughput(
    model: opt.Model = opt.DEFAULT_MODEL,
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Requests in all.")] = 64,
    input_len: common.InputLen = 256,
    output_len: common.OutputLen = 64,
    max_num_seqs: opt.MaxNumSeqs = 64,
    rounds: common.Rounds = 3,
    quantization: opt.QuantizationOption = None,
    threads: opt.Threads = None,
    json: common.AsJson = False,
    profile: common.Profile = False,
) -> None:
    """A batch of requests: total_tok_s (prompts and answers), output_tok_s, wall_s."""
    from octavo.benchmarking.record import make_record
    from octavo.cli.bench.record import emit

    llm = common.start(
        model, quantization, threads, length=input_len + output_len, profile=profile, max_num_seqs=max_num_seqs
    )
    figures = common.measure(
        llm, rounds, lambda seed: _round(llm, num_prompts, input_len, output_len, seed), profile=profile
    )
    record = make_record(
        "throughput",
        figures,
        threads=threads,
        **common.about_model(model, quantization),
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        max_num_seqs=max_num_seqs,
    )
    emit(record, as_json=json)


def _round(llm: LLM, num_prompts: int, input_len: int, output_len: int, seed: int) -> dict[str, float]:
    work = common.prompts(llm, num_prompts, input_len, seed=seed)
    began = time.perf_counter()
    outputs = llm.generate(work, common.greedy(output_len), use_tqdm=False)
    seconds = time.perf_counter() - began
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "total_tok_s": (num_prompts * input_len + generated) / seconds,
        "output_tok_s": generated / seconds,
        "wall_s": seconds,
    }
