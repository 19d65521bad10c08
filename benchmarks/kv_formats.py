"""Measures what each type of the KV cache costs in time and memory: long contexts, and 64 requests at once.

    python benchmarks/kv_formats.py [MODEL] [--quantization FORM] [--types TYPE ...] [--rounds 5] [--json FILE]

Every type runs in a process of its own, the types in turn round after round, and medians are recorded. Per type
there are the rate of a prompt of CONTEXT tokens, the rate of the answer after it (one sequence, and 8 that share
nothing), the whole rate of 64 requests of 256 tokens in and 64 out, and the largest resident memory of those. Run it
on an idle machine; what a type costs in quality is measured by benchmarks/quality.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from recording import RESULTS, about_model, dashed, provenance, write

from octavo.cli.options import KvCacheDtype, Quantization
from octavo.frontend.options import DEFAULT_MODEL
from octavo.kv_cache import KV_CACHE_TYPES

_WORK = """
import json, random, sys, time
from octavo import LLM, SamplingParams
model, settings, context = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
chance = random.Random(0)

def prompts(count, length):
    return [{"prompt_token_ids": [chance.randrange(1000, 40000) for _ in range(length)]} for _ in range(count)]

def seconds(llm, work, tokens):
    began = time.perf_counter()
    llm.generate(work, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - began

found = {}
# The batch first: its memory is the largest the process has had.
with LLM(model, max_model_len=512, **settings) as llm:
    found["batch_tokens_per_s"] = 64 * (256 + 64) / seconds(llm, prompts(64, 256), 64)
    plan = llm.memory_plan
found["peak_rss_bytes"] = next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
found["kv_bytes_per_token"] = plan.block_bytes / plan.block_size
found["batch_kv_bytes"] = 64 * 320 * plan.block_bytes // plan.block_size
with LLM(model, max_model_len=context + 128, **settings) as llm:
    seconds(llm, prompts(1, 64), 8)
    for count in (1, 8):
        work = prompts(count, context)
        prefill = seconds(llm, work, 1)
        again = seconds(llm, work, 1)  # from the prefix cache: what a start costs beside the answer
        found[f"decode_{count}_tokens_per_s"] = 64 * count / (seconds(llm, work, 65) - again)
        if count == 1:
            found["prefill_tokens_per_s"] = context / prefill
print(json.dumps(found))
"""


def measure(model: str, quantization: str | None, kind: str, context: int) -> dict[str, float]:
    """One round of one type, in a fresh process."""
    settings = {"quantization": quantization, "kv_cache_dtype": kind}
    command = [sys.executable, "-c", _WORK, model, json.dumps(settings), str(context)]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--quantization", choices=[form.value for form in Quantization], help="weights")
    parser.add_argument(
        "--types",
        nargs="+",
        default=list(KV_CACHE_TYPES),
        choices=[kind.value for kind in KvCacheDtype],
        help="types of the KV cache (default: all)",
    )
    parser.add_argument("--context", type=int, default=4096, help="tokens of a long prompt (default 4096)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--json", type=Path, help="where the record goes; else a file in benchmarks/results")
    return parser.parse_args()


def main() -> None:
    options = parse()
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in options.types}
    for number in range(options.rounds):
        for kind, found in rounds.items():
            found.append(measure(options.model, options.quantization, kind, options.context))
            print(f"round {number + 1}/{options.rounds} {kind}: {json.dumps(found[-1])}", flush=True)
    types = {
        kind: {name: statistics.median(each[name] for each in found) for name in found[0]}
        for kind, found in rounds.items()
    }
    record: dict[str, Any] = {
        "what": "speed and memory of each type of the KV cache, medians of the rounds",
        **provenance(["numpy"]),
        **about_model(options.model, options.quantization),
        "context": options.context,
        "types": types,
        "rounds": rounds,
    }
    name = dashed(f"kv formats {record['model']} {record['form']} {record['date'][:10]}.json")
    path = options.json or RESULTS / name
    write(record, path)
    for kind, figures in types.items():
        print(f"{kind:>20}  " + "  ".join(f"{name} {value:,.0f}" for name, value in figures.items()))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
