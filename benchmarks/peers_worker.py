"""Runs the pieces of work that peers.py sends to one engine, and tells how long each took.

    python peers_worker.py octavo|openvino|vllm MODEL SETTINGS

It is run by the Python that has the engine, so it uses nothing but the standard library besides. SETTINGS is JSON.
After the first token it prints a line ``FIRST {...}`` with the engine's version; then, for each line of
standard input, which is a file name, it does the pieces of work in that file and prints ``DONE {...}`` for each.
A piece is {"name", "before", "prompts", "tokens"}: prompts of token ids, answered greedily with exactly that many
tokens each, all sent at once; those of "before" are answered first and not timed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, int], int]  # prompts and tokens of each answer; the number of tokens it gave


def octavo(model: str, settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """octavo's LLM; also what it holds in memory, for the roofline."""
    from octavo import LLM, SamplingParams, __version__
    from octavo.backends.cpu.backend import instruction_set

    llm = LLM(
        model,
        quantization=settings["quantization"],
        threads=settings["threads"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
    )

    def generate(prompts: Prompts, tokens: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    llm.wait_for_memory()  # the others give their caches memory while they load
    plan = llm.memory_plan
    return generate, {
        "version": __version__,
        "isa": instruction_set(),
        "weights_bytes": plan.weights_bytes,
        "kv_token_bytes": plan.block_bytes / plan.block_size,
    }


def openvino(model: str, settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """OpenVINO GenAI with continuous batching and a prefix cache."""
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = settings["cache_gb"]
    scheduler.max_num_seqs = settings["max_num_seqs"]
    scheduler.max_num_batched_tokens = settings["max_num_batched_tokens"]
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    properties = {"INFERENCE_PRECISION_HINT": settings["arithmetic"], "INFERENCE_NUM_THREADS": settings["threads"]}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def generate(prompts: Prompts, tokens: int) -> int:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        inputs = [openvino.Tensor(numpy.array([ids], dtype=numpy.int64)) for ids in prompts]
        results = pipeline.generate(inputs, [config] * len(inputs))
        return sum(len(result.m_generation_ids[0]) for result in results)

    return generate, {"version": openvino_genai.__version__}


def vllm(model: str, settings: dict[str, Any]) -> tuple[Generate, dict[str, Any]]:
    """vLLM for CPUs."""
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(
        model,
        dtype=settings["dtype"],
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        gpu_memory_utilization=settings["memory_share"],
        enforce_eager=settings["eager"],
        disable_log_stats=True,
    )

    def generate(prompts: Prompts, tokens: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate, {"version": __version__}


def do(piece: dict[str, Any], generate: Generate) -> dict[str, Any]:
    """One piece of work: its name and the seconds."""
    for prompts in piece["before"]:
        generate(prompts, 1)
    expected = len(piece["prompts"]) * piece["tokens"]
    began = time.perf_counter()
    given = generate(piece["prompts"], piece["tokens"])
    seconds = time.perf_counter() - began
    if given != expected:
        raise SystemExit(f"{piece['name']}: {expected} tokens were asked for, {given} came")
    return {"name": piece["name"], "seconds": seconds}


def main() -> None:
    engine, model, settings = sys.argv[1:]
    generate, about = {"octavo": octavo, "openvino": openvino, "vllm": vllm}[engine](model, json.loads(settings))
    generate([[1000]], 1)
    print("FIRST", json.dumps(about), flush=True)
    for line in sys.stdin:
        for piece in json.loads(Path(line.strip()).read_text(encoding="utf-8")):
            print("DONE", json.dumps(do(piece, generate)), flush=True)


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
