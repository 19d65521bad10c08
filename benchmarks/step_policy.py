"""Shows what the bound on a step does to latencies: the real scheduler under a load of clients, in simulated time.

    python benchmarks/step_policy.py [--prompt-us 420] [--decode-us 750] [--clients 32] [--requests 128] [--rate 0]

A step takes --step-us, --prompt-us for each token of a prompt and --decode-us for each sequence that is decoded, which
fits what is measured (benchmarks/engine_step.py has the real engine). Clients send their next request when the last one
is answered, or with --rate at random, so many a second. For each bound on a step one line is printed, in milliseconds.

Nothing but the work decides how long a burst waits: the last of its prompts has its first token when all have been
computed, in whatever order and steps. The bound trades pauses in the streams that run (ITL p99) against the prompts
that wait (TTFT), and neither changes how many requests are answered.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from load_generator import percentile

import octavo.engine.core
from octavo.backends.interface import SampledToken, StepBatch, StepOutput
from octavo.engine.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.request import EngineRequest
from octavo.sampling.params import SamplingParams

_BOUNDS = (None, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5)
_BLOCKS = 16384
_MAX_LEN = 16384
_TURNAROUND = 0.004  # seconds from an answer's last token to the client's next request in the engine
_VOCABULARY = 1000


class _Clock:
    """Time as it would be: the engine reads it instead of the machine's."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class _Backend:
    """Computes nothing, and lets time go by."""

    clock: _Clock
    step: float
    prompt: float
    decode: float
    block_size: int = 16
    num_blocks: int = _BLOCKS
    max_model_len: int = _MAX_LEN
    vocab_size: int = _VOCABULARY

    def execute(self, batch: StepBatch) -> StepOutput:
        decodes = sum(work.count == 1 for work in batch.work)
        prompts = sum(work.count for work in batch.work) - decodes
        self.clock.now += self.step + prompts * self.prompt + decodes * self.decode
        return StepOutput([SampledToken(5, -1.0, 1, []) if work.sample else None for work in batch.work])


@dataclass(slots=True)
class _Times:
    sent: float
    tokens: list[float]


def simulate(options: argparse.Namespace, bound: float | None) -> tuple[float, list[_Times]]:
    """Answer every request with this bound on a step: requests a second, and when their tokens came."""
    clock = _Clock()
    backend = _Backend(clock, *(1e-6 * cost for cost in (options.step_us, options.prompt_us, options.decode_us)))
    config = EngineConfig(num_blocks=_BLOCKS, max_model_len=_MAX_LEN, max_step_seconds=bound)
    engine = Engine(config, backend)
    words = np.random.default_rng(options.seed)
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)
    due = _arrivals(options, random.Random(options.seed))
    with mock.patch.object(octavo.engine.core, "perf_counter", clock):
        times = _run(engine, clock, options, params, words, due)
    return options.requests / clock.now, list(times.values())


def _run(
    engine: Engine,
    clock: _Clock,
    options: argparse.Namespace,
    params: SamplingParams,
    words: np.random.Generator,
    due: list[float],
) -> dict[str, _Times]:
    times: dict[str, _Times] = {}
    numbers = itertools.count()
    later = options.requests - len(due)
    while due or engine.has_work():
        while due and due[0] <= clock.now:
            name = str(next(numbers))
            times[name] = _Times(heapq.heappop(due), [])
            prompt = words.integers(10, _VOCABULARY, options.input_len).astype(np.int32)
            engine.add(EngineRequest(name, prompt, params, eos_ids=(2,), arrival=times[name].sent))
        if not engine.has_work():
            clock.now = due[0]
            continue
        for output in engine.step():
            times[output.request_id].tokens.append(clock.now)
            if output.finished and later:
                later -= 1
                heapq.heappush(due, clock.now + _TURNAROUND)
    return times


def _arrivals(options: argparse.Namespace, chance: random.Random) -> list[float]:
    if options.rate:
        return list(itertools.accumulate(chance.expovariate(options.rate) for _ in range(options.requests)))
    return [0.002 * number for number in range(min(options.clients, options.requests))]


def figures(rate: float, times: Sequence[_Times]) -> dict[str, float]:
    """What is printed of a run."""
    ttft = [request.tokens[0] - request.sent for request in times]
    tpot = [(request.tokens[-1] - request.tokens[0]) / (len(request.tokens) - 1) for request in times]
    itl = [after - before for request in times for before, after in itertools.pairwise(request.tokens)]
    found = {"req/s": rate}
    shares: dict[str, tuple[list[float], tuple[float, ...]]] = {
        "TTFT": (ttft, (50, 99)),
        "TPOT": (tpot, (50, 99)),
        "ITL": (itl, (50, 99)),
    }
    for name, (values, wanted) in shares.items():
        found |= {f"{name} p{share:g}": 1000 * percentile(values, share) for share in wanted}
    return found | {"ITL max": 1000 * max(itl)}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers: dict[str, tuple[Any, str]] = {
        "--step-us": (500.0, "what a step costs by itself"),
        "--prompt-us": (420.0, "of a token of a prompt"),
        "--decode-us": (750.0, "of a token of an answer"),
        "--clients": (32, "with one request at a time each"),
        "--rate": (0.0, "requests a second, in place of clients that wait for their answers"),
        "--requests": (128, "in all"),
        "--input-len": (256, "tokens of each prompt"),
        "--output-len": (64, "tokens of each answer"),
        "--seed": (1, "of arrivals"),
    }
    for name, (default, explanation) in numbers.items():
        parser.add_argument(name, type=type(default), default=default, help=explanation)
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    if options.output_len < 2:
        raise SystemExit("--output-len must be at least 2: there is no time between tokens otherwise")
    for place, bound in enumerate(_BOUNDS):
        found = figures(*simulate(options, bound))
        if place == 0:
            print(f"{'bound':>8}" + "".join(f"{name:>10}" for name in found))
        shown = "none" if bound is None else f"{bound:g} s"
        print(f"{shown:>8}" + "".join(f"{value:10.{2 if name == 'req/s' else 0}f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
