"""Measures what octavo takes besides time per token: disk, import, start, memory and processor when idle.

    python benchmarks/footprint.py [MODEL] [--rounds 7] [--json FILE]

Run it in an environment where octavo is installed (`pip install .`). Every start is a fresh process, the model present.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from recording import RESULTS, about_model, provenance, write

from octavo.frontend.options import DEFAULT_MODEL

# 64 requests of 256 tokens in and 64 out, none of them alike, then ten idle seconds.
_LOAD = """
import json, random, sys, time
from octavo import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=512, **json.loads(sys.argv[2]))
chance = random.Random(0)
prompts = [{"prompt_token_ids": [chance.randrange(1000, 40000) for _ in range(256)]} for _ in range(64)]
began = time.perf_counter()
llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True), use_tqdm=False)
seconds = time.perf_counter() - began
plan, stats = llm.memory_plan, llm.stats()
before = time.process_time()
time.sleep(10)
rss = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith(("VmHWM", "RssFile")))
blocks = min(plan.num_blocks, 64 * -(-320 // stats.block_size))
print(json.dumps({
    "seconds": seconds,
    "peak_rss_bytes": int(rss["VmHWM"].split()[0]) * 1024,
    "of_it_files_bytes": int(rss["RssFile"].split()[0]) * 1024,
    "planned_bytes": plan.total_bytes - plan.kv_bytes + blocks * plan.block_bytes,
    "packed_weights_bytes": plan.weights_bytes,
    "arena_bytes": plan.arena_bytes,
    "kv_used_bytes": blocks * plan.block_bytes,
    "kv_pool_bytes": plan.kv_bytes,
    "preemptions": stats.counters.preemptions,
    "idle_cpu_share": (time.process_time() - before) / 10,
}))
"""
# The load in a pool that holds half of it at once: requests then wait for each other, which costs little time.
_HALF_POOL = 330_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=7, help="starts measured (default 7)")
    parser.add_argument("--json", type=Path, default=RESULTS / "footprint.json", help="where the record goes")
    options = parser.parse_args()
    command = [sys.executable, "-m", "octavo.cli.main", "run", "--model", options.model, "--max-tokens", "1", "Hello"]
    first_token = [_seconds(command) for _ in range(options.rounds + 1)][1:]
    imports = [_import_seconds() for _ in range(options.rounds + 1)][1:]
    loads = {
        name: json.loads(_output(["-c", _LOAD, options.model, json.dumps(settings)]))
        for name, settings in {"load": {}, "load_in_half_a_pool": {"kv_cache_bytes": _HALF_POOL}}.items()
    }
    for load in loads.values():
        load["over_weights_and_used_kv_bytes"] = (
            load["peak_rss_bytes"] - load["packed_weights_bytes"] - load["kv_used_bytes"]
        )
    record: dict[str, Any] = provenance(["numpy", "tokenizers"]) | {
        **about_model(options.model),
        "installed_bytes": installed_bytes("octavo"),
        "import_s": statistics.median(imports),
        "command_to_first_token_s": statistics.median(first_token),
        "command_to_first_token_all_s": first_token,
    }
    record |= loads
    write(record, options.json)
    print(json.dumps(record, indent=1))


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def _import_seconds() -> float:
    """`import octavo` with the class everything starts from, which the bare import leaves for later."""
    code = "import time; t = time.perf_counter(); import octavo; octavo.LLM; print(time.perf_counter() - t)"
    return float(_output(["-c", code]))


def _output(arguments: list[str]) -> str:
    """What Python prints when it is run with these arguments."""
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout


def installed_bytes(root: str) -> dict[str, int]:
    """Bytes on disk of a distribution and everything it requires, by distribution."""
    sizes: dict[str, int] = {}
    pending = [root]
    while pending:
        name = pending.pop()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a dependency of another platform
        name = distribution.metadata["Name"].lower()
        if name in sizes:
            continue
        files = [Path(str(distribution.locate_file(file))) for file in distribution.files or []]
        sizes[name] = sum(os.path.getsize(file) for file in files if file.is_file())
        for requirement in distribution.requires or []:
            if "extra ==" not in requirement:
                pending.append(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])
    return dict(sorted(sizes.items(), key=lambda item: -item[1])) | {"total": sum(sizes.values())}


if __name__ == "__main__":
    main()
