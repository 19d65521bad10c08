"""How cost grows: batch, prompt, context, output, threads, memory; waiting requests and cached blocks without a model.

    python benchmarks/curves.py [--model smollm2-135m] [--quantization w8] [--only batch,prompt,...] [--small]

The curves of the scheduler run with a back end that computes nothing, so that what is left is the engine's own time.
Each point is the median of --repeats, or of the steps of one run; it all takes about five minutes. Beside the values
stands the exponent of growth between a curve's last points: 1 is linear, above 1 worse. Writes JSON, and an HTML page
with the plots, into benchmarks/results. --small tries it all with sizes that take seconds; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from engine_step import NullBackend
from random_model import write_random_model
from recording import RESULTS, about_model, dashed, provenance, write

from octavo.benchmarking.plots import Series, chart
from octavo.engine.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.request import EngineRequest
from octavo.frontend.loading import LoadedModel, load_engine
from octavo.frontend.options import EngineOptions
from octavo.planning.hardware import probe
from octavo.sampling.params import SamplingParams
from octavo.weights.hub import resolve_model

# Fills a KV pool to its last block and tells what the process then holds, and what was planned.
_FILL = """
import json, os, sys
import numpy as np
from octavo.engine.request import EngineRequest
from octavo.frontend.loading import load_engine
from octavo.frontend.options import EngineOptions
from octavo.sampling.params import SamplingParams

options = json.loads(sys.argv[1])
loaded = load_engine(EngineOptions(**options))
engine, chance = loaded.engine, np.random.default_rng(0)
params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
for number in range(10_000):
    stats = engine.stats()
    if stats.free_blocks == 0 or stats.evictions:
        break
    length = min(1024, loaded.plan.num_blocks * 16 - 17)
    prompt = chance.integers(10, loaded.vocab_size - 1, length, dtype=np.int32)
    engine.add(EngineRequest(str(number), prompt, params, eos_ids=(2,)))
    while engine.has_work():
        engine.step()
pages = int(open("/proc/self/statm").read().split()[1])
plan = loaded.plan
needed = plan.weights_bytes + plan.kv_bytes + plan.arena_bytes
print(json.dumps({"resident": pages * os.sysconf("SC_PAGESIZE"), "planned": plan.total_bytes, "needed": needed}))
"""
_MEMORY_LINES = {
    "resident": "resident",
    "planned": "planned, with the reserve",
    "needed": "planned: weights, KV pool, arena",
}
_PREFILL_ROOM = 64  # positions kept free after a context for the decode steps that are timed


@dataclass(frozen=True, slots=True)
class Curve:
    """One figure over one size. ``values`` are a list of (size, value) for each line."""

    name: str
    title: str
    x_label: str
    y_label: str
    values: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    rate: bool = False  # whether the values are rates: their reciprocal is the cost

    def add(self, line: str, size: float, value: float) -> None:
        self.values.setdefault(line, []).append((size, value))
        print(f"{self.name:>8} {line:<34} {size:>10,.0f} {value:>14,.3f}", flush=True)

    def growth(self, line: str) -> float | None:
        """The exponent with which the cost of one more unit of work grows over the last points."""
        points = [point for point in self.values[line] if point[0] > 0 and point[1] > 0][-3:]
        if len(points) < 2:
            return None
        (x0, y0), (x1, y1) = points[0], points[-1]
        slope = math.log(y1 / y0) / math.log(x1 / x0)
        return -slope if self.rate else slope

    def record(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "x": self.x_label,
            "y": self.y_label,
            "lines": {
                line: {"points": points, "cost_exponent": self.growth(line)} for line, points in self.values.items()
            },
        }

    def svg(self) -> str:
        lines = [Series(line, points) for line, points in self.values.items()]
        return chart(lines, title=self.title, x_label=self.x_label, y_label=self.y_label, x_log=True, y_log=True)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: the full range, or little of it to try the program."""

    batch: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    prompt: Sequence[int] = (16, 64, 256, 1024, 2048, 4096, 8192)
    context: Sequence[int] = (128, 512, 2048, 4096, 8192, 16384, 32768)
    output: Sequence[int] = (128, 512, 1024, 2048, 4096)
    waiting: Sequence[int] = (1, 10, 100, 1000, 3000, 10_000)
    cached: Sequence[int] = (1000, 10_000, 100_000, 1_000_000)
    pool: Sequence[int] = (128, 512, 2048)
    decode_steps: int = 32
    engine_steps: int = 500


SMALL = Sizes((1, 4), (16, 64), (128, 256), (32, 64), (1, 100), (1000, 4000), (64, 96), 4, 30)


# --- with the model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Makes engines of one model."""

    path: Path
    quantization: str | None
    threads: int | None
    repeats: int

    @contextmanager
    def engine(self, **options: Any) -> Iterator[LoadedModel]:
        settings = {"threads": self.threads, "quantization": self.quantization, "enable_prefix_caching": False}
        loaded = load_engine(EngineOptions(model=str(self.path), **{**settings, **options}), with_tokenizer=False)
        try:
            yield loaded
        finally:
            loaded.close()

    def middle(self, measured: Callable[[int], float]) -> float:
        """The median of a measurement repeated; it is given its number, so that no two have equal prompts."""
        return statistics.median(measured(number) for number in range(self.repeats))


def random_prompts(loaded: LoadedModel, count: int, length: int, seed: int) -> list[np.ndarray]:
    """Prompts of random ids, no two alike."""
    chance = np.random.default_rng(seed)
    return [chance.integers(10, loaded.vocab_size - 1, length, dtype=np.int32) for _ in range(count)]


def submit(loaded: LoadedModel, prompts: Sequence[np.ndarray], output: int, name: str) -> None:
    """Queue a request for each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        loaded.engine.add(EngineRequest(f"{name}/{number}", prompt, params, eos_ids=(2,)))


def drain(engine: Engine) -> None:
    """Run until nothing is left."""
    while engine.has_work():
        engine.step()


def prefill_seconds(loaded: LoadedModel, length: int, seed: int) -> float:
    """Seconds for a prompt and its one token."""
    submit(loaded, random_prompts(loaded, 1, length, seed), 1, f"prompt {length} {seed}")
    began = time.perf_counter()
    drain(loaded.engine)
    return time.perf_counter() - began


def decode_seconds(loaded: LoadedModel, prompts: Sequence[np.ndarray], steps: int, name: str) -> float:
    """Seconds a decode step takes with all of these sequences: the median of ``steps``."""
    batch, engine = len(prompts), loaded.engine
    submit(loaded, prompts, steps + _decodes_before(batch, len(prompts[0])), name)
    while engine.stats().step_decode_tokens < batch:
        if not engine.has_work():
            raise SystemExit(f"{batch} sequences never decoded together: the KV cache is too small for them")
        engine.step()
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - began)
    drain(engine)
    return statistics.median(taken)


def _decodes_before(batch: int, context: int) -> int:
    """Tokens the first sequence may have to generate before the last one's prompt has been read."""
    return 4 + batch * context // 1024


def measure_batch(model: Model, sizes: Sizes) -> list[Curve]:
    curve = Curve("batch", "Decoding, by batch", "sequences", "output tokens a second", rate=True)
    context, most = 128, max(sizes.batch)
    room = context + sizes.decode_steps + _decodes_before(most, context)
    with model.engine(max_num_seqs=most, max_model_len=room, max_step_seconds=None) as loaded:
        decode_seconds(loaded, random_prompts(loaded, 1, context, 0), sizes.decode_steps, "warm up")
        for batch in sizes.batch:
            prompts = random_prompts(loaded, batch, context, batch)
            seconds = decode_seconds(loaded, prompts, sizes.decode_steps, f"batch {batch}")
            curve.add("after 128 tokens", batch, batch / seconds)
    return [curve]


def measure_prompt(model: Model, sizes: Sizes) -> list[Curve]:
    curve = Curve("prompt", "Reading a prompt, by its length", "prompt tokens", "prompt tokens a second", rate=True)
    with model.engine(max_num_seqs=1) as loaded:
        prefill_seconds(loaded, 16, 0xFFFF)
        for length in within(sizes.prompt, loaded.max_model_len - 1, "prompt"):

            def read(seed: int, length: int = length) -> float:
                return prefill_seconds(loaded, length, length * 1000 + seed)

            curve.add("one prompt", length, length / model.middle(read))
    return [curve]


def measure_context(model: Model, sizes: Sizes) -> list[Curve]:
    """To the end of the model's context, and beyond it with four layers of random weights and a longer one.

    Each context begins with the one before it, which the prefix cache has, so that it all costs one long prompt.
    """
    title = "Decoding one stream, by context"
    curve = Curve("context", title, "tokens before", "output tokens a second", rate=True)
    with tempfile.TemporaryDirectory() as folder:
        long = replace(model, path=write_random_model(Path(folder), layers=4), quantization=None)
        for line, source in (("the model", model), ("four random layers", long)):
            with source.engine(max_num_seqs=1, enable_prefix_caching=True) as loaded:
                (text,) = random_prompts(loaded, 1, max(sizes.context), 0)
                for context in within(sizes.context, loaded.max_model_len - _PREFILL_ROOM, line):
                    seconds = decode_seconds(loaded, [text[:context]], sizes.decode_steps, f"context {context}")
                    curve.add(line, context, 1.0 / seconds)
    return [curve]


def measure_output(model: Model, sizes: Sizes) -> list[Curve]:
    """One long answer, looked at while it grows."""
    curve = Curve("output", "A whole answer, by its length", "output tokens", "seconds")
    with model.engine(max_num_seqs=1) as loaded:
        lengths = within(sizes.output, loaded.max_model_len - 32, "output")
        taken: dict[int, list[float]] = {length: [] for length in lengths}
        for number in range(model.repeats):
            submit(loaded, random_prompts(loaded, 1, 16, number), max(lengths), f"output {number}")
            began, produced = time.perf_counter(), 0
            while loaded.engine.has_work():
                loaded.engine.step()
                produced += 1
                if produced in taken:
                    taken[produced].append(time.perf_counter() - began)
        for length, seconds in taken.items():
            curve.add("after 16 tokens", length, statistics.median(seconds))
    return [curve]


def measure_threads(model: Model, sizes: Sizes) -> list[Curve]:
    curve = Curve("threads", "Speed, by threads", "threads", "tokens a second", rate=True)
    length, batch = (64, 2) if sizes is SMALL else (1024, 32)
    for threads in range(1, (model.threads or probe().default_threads) + 1):
        with model.engine(threads=threads, max_num_seqs=batch, max_model_len=length + 64) as loaded:
            prefill_seconds(loaded, 16, 0xFFFF)
            curve.add(
                f"prompt of {length}", threads, length / model.middle(lambda n: prefill_seconds(loaded, length, n))
            )
            for count in (1, batch):
                prompts = random_prompts(loaded, count, 16, count)
                seconds = decode_seconds(loaded, prompts, sizes.decode_steps, f"decode {count}")
                curve.add(f"decoding {count} at once", threads, count / seconds)
    return [curve]


def measure_memory(model: Model, sizes: Sizes) -> list[Curve]:
    curve = Curve("memory", "Memory with the KV pool full, by its blocks", "KV blocks", "megabytes")
    for blocks in sizes.pool:
        options = {
            "model": str(model.path),
            "quantization": model.quantization,
            "threads": model.threads,
            "num_gpu_blocks_override": blocks,
            "max_model_len": min(1040, blocks * 16),
        }
        done = subprocess.run([sys.executable, "-c", _FILL, json.dumps(options)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{blocks} blocks: {done.stderr[-2000:]}")
        for line, value in json.loads(done.stdout).items():
            curve.add(_MEMORY_LINES[line], blocks, value / 1e6)
    return [curve]


def within(sizes: Sequence[int], limit: int, what: str) -> list[int]:
    """The sizes the model takes, its limit in place of the first that is beyond it."""
    fitting = [size for size in sizes if size <= limit]
    if len(fitting) < len(sizes):
        print(f"{what}: this model ends at {limit}")
        fitting += [limit] if limit > max(fitting, default=0) * 1.2 else []
    return fitting


# --- without a model: what the engine itself costs --------------------------------------------------------------------


def bare_engine(blocks: int, running: int) -> Engine:
    """An engine whose back end computes nothing."""
    backend = NullBackend()
    backend.num_blocks = blocks
    return Engine(EngineConfig(num_blocks=blocks, max_model_len=backend.max_model_len, max_num_seqs=running), backend)


def own_step_seconds(engine: Engine, steps: int) -> list[tuple[float, float]]:
    """For each of ``steps`` steps: seconds until the back end is called, and seconds of the engine altogether."""
    found = []
    for _ in range(steps):
        engine.step()
        stats = engine.stats()
        found.append((stats.schedule_seconds, stats.schedule_seconds + stats.process_seconds))
    return found


def measure_waiting(model: Model, sizes: Sizes) -> list[Curve]:
    steps = Curve("waiting", "A step of 64 sequences, by waiting requests", "waiting requests", "microseconds")
    churn = Curve("arrive", "Arriving and leaving, by waiting requests", "waiting requests", "microseconds")
    for waiting in sizes.waiting:
        engine = bare_engine(1 << 16, 64)
        params = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
        for number in range(64 + waiting):
            prompt = np.arange(number, number + 64, dtype=np.int32) % 40_000
            began = time.perf_counter()
            engine.add(EngineRequest(f"r{number}", prompt, params, eos_ids=(2,)))
        added = time.perf_counter() - began
        for _ in range(20):
            engine.step()
        gc.collect()
        taken = own_step_seconds(engine, sizes.engine_steps)
        for line, place in (("scheduling", 0), ("scheduling and results", 1)):
            ordered = sorted(pair[place] for pair in taken)
            steps.add(f"{line}, median", waiting, 1e6 * statistics.median(ordered))
            steps.add(f"{line}, p99", waiting, 1e6 * ordered[int(len(ordered) * 0.99)])
        began = time.perf_counter()
        engine.abort(f"r{64 + waiting // 2}" if waiting > 1 else "r64")
        churn.add("abort of one in the middle", waiting, 1e6 * (time.perf_counter() - began))
        churn.add("add of one", waiting, 1e6 * added)
        ended = []
        for number in range(min(32, waiting)):  # one ends, so that another is admitted
            engine.abort(f"r{number}")
            engine.step()
            ended.append(engine.stats().schedule_seconds)
        churn.add("step that admits one", waiting, 1e6 * statistics.median(ended))
    return [steps, churn]


def measure_cached(model: Model, sizes: Sizes) -> list[Curve]:
    curve = Curve("cached", "The prefix cache, by blocks in it", "cached blocks", "microseconds")
    length = 4096
    for blocks in sizes.cached:
        engine = bare_engine(blocks + 2 * length // 16, 64)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        chance = np.random.default_rng(blocks)
        began = time.perf_counter()
        for number in range(max(1, blocks * 16 // length)):
            prompt = chance.integers(10, 40_000, length, dtype=np.int32)
            engine.add(EngineRequest(f"fill {number}", prompt, params, eos_ids=(2,)))
            drain(engine)
        filling = (time.perf_counter() - began) / blocks
        cached = engine.stats().cached_blocks
        gc.collect()
        curve.add("filling, a block", cached, 1e6 * filling)
        # A prompt that is in the cache but for its end, and one that is not: the second evicts.
        for line, again in (("request found in the cache, a block", prompt), ("request that evicts, a block", None)):
            taken = []
            for number in range(9):
                ids = again if again is not None else chance.integers(10, 40_000, length, dtype=np.int32)
                began = time.perf_counter()
                engine.add(EngineRequest(f"{line} {number}", ids, params, eos_ids=(2,)))
                drain(engine)
                taken.append(time.perf_counter() - began)
            curve.add(line, cached, 1e6 * statistics.median(taken) / (length // 16))
        running = SamplingParams(temperature=0.0, max_tokens=8000, ignore_eos=True)
        for number in range(32):
            engine.add(EngineRequest(f"run {number}", np.arange(number, number + 64, dtype=np.int32), running))
        for _ in range(10):
            engine.step()
        taken = [whole for _, whole in own_step_seconds(engine, sizes.engine_steps)]
        curve.add("decode step of 32", cached, 1e6 * statistics.median(taken))
    return [curve]


CURVES: dict[str, Callable[[Model, Sizes], list[Curve]]] = {
    "waiting": measure_waiting,
    "cached": measure_cached,
    "batch": measure_batch,
    "prompt": measure_prompt,
    "context": measure_context,
    "output": measure_output,
    "threads": measure_threads,
    "memory": measure_memory,
}


# --- the page ---------------------------------------------------------------------------------------------------------


def page(curves: Sequence[Curve], title: str) -> str:
    """The plots and the exponents as one HTML page."""
    rows = []
    for curve in curves:
        for line in curve.values:
            growth = curve.growth(line)
            shown = "&ndash;" if growth is None else f"{growth:+.2f}"
            rows.append(f"<tr><td>{escape(curve.title)}</td><td>{escape(line)}</td><td>{shown}</td></tr>")
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            "<style>:root{color-scheme:light dark}body{font:15px system-ui;max-width:1260px;margin:2rem auto}"
            "div{display:flex;flex-wrap:wrap;gap:1rem}td,th{padding:.2rem .8rem;text-align:left}</style></head><body>",
            f"<h1>{escape(title)}</h1><div>{''.join(curve.svg() for curve in curves)}</div>",
            "<h2>Growth</h2><p>The exponent over a curve's last points: of the cost of a token where the curve is a "
            "rate, of the value elsewhere. 0 is constant, 1 in proportion.</p>",
            f"<table><tr><th>curve</th><th>line</th><th>exponent</th></tr>{''.join(rows)}</table></body></html>",
        ]
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="model to measure")
    parser.add_argument("--quantization", help="weight form; default: as in the file")
    parser.add_argument("--threads", type=int, help="threads; default: the engine's")
    parser.add_argument("--only", default=",".join(CURVES), help="which curves, separated by commas")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each point")
    parser.add_argument("--small", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--output", type=Path, help="JSON file to write, the page beside it")
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    unknown = sorted(set(options.only.split(",")) - set(CURVES))
    if unknown:
        sys.exit(f"--only: there is no curve {unknown[0]!r}; there are {', '.join(CURVES)}")
    repeats = 1 if options.small else options.repeats
    model = Model(resolve_model(options.model), options.quantization, options.threads, repeats)
    record: dict[str, Any] = {"what": "how cost grows", **provenance(["numpy"])}
    sizes = SMALL if options.small else Sizes()
    curves = [curve for name in options.only.split(",") for curve in CURVES[name](model, sizes)]
    record |= {
        **about_model(model.path, options.quantization),
        "repeats": model.repeats,
        "curves": {curve.name: curve.record() for curve in curves},
    }
    form = options.quantization or ""
    path = options.output or RESULTS / dashed(f"curves {options.model} {form} {record['date'][:10]}.json")
    write(record, path)
    html = path.with_suffix(".html")
    html.write_text(page(curves, f"How cost grows: {options.model} {form}".strip()) + "\n", encoding="utf-8")
    print(f"written to {path} and {html.name}")


if __name__ == "__main__":
    main()
