"""Measures the Python cost of an engine step in microseconds, with a back end that computes nothing.

The first table has steps of decodes by batch size. The second has the scheduling of 64 sequences while others wait, by
policy: of steps in which nothing changes, and of steps before which one sequence ended so that another is admitted.
Under `fair` every request is of a tenant of its own. The last has scheduling by blocks in the prefix cache, for a
request that finds its prefix there and one that does not.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import numpy as np

from octavo.backends.interface import SampledToken, StepBatch, StepOutput
from octavo.engine.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.request import EngineRequest
from octavo.sampling.params import SamplingParams


class NullBackend:
    """Returns the same token for every sampled row; its own time is measured and taken off."""

    block_size = 16
    num_blocks = 1 << 16
    vocab_size = 49152
    max_model_len = 8192

    def __init__(self) -> None:
        self.seconds = 0.0
        self._token = SampledToken(1, -1.0, 1, [])

    def execute(self, batch: StepBatch) -> StepOutput:
        begin = time.perf_counter()
        token = self._token
        output = StepOutput([token if item.sample else None for item in batch.work])
        self.seconds += time.perf_counter() - begin
        return output


def measure(batch: int, steps: int, caching: bool) -> tuple[float, float, float]:
    """Median, mean and 99th percentile of a decode step in microseconds."""
    backend = NullBackend()
    config = EngineConfig(
        num_blocks=backend.num_blocks, max_model_len=8192, max_num_seqs=batch, enable_prefix_caching=caching
    )
    engine = Engine(config, backend)
    for number in range(batch):
        prompt = [(number * 31 + position) % 1000 for position in range(200 + number)]
        params = SamplingParams(temperature=0.0, max_tokens=steps + 100, ignore_eos=True)
        engine.add(EngineRequest(f"r{number}", prompt, params, eos_ids=(2,)))
    while engine.stats().running < batch or any(output.finished for output in engine.step()):
        engine.step()
    for _ in range(20):
        engine.step()
    times = []
    for _ in range(steps):
        backend.seconds = 0.0
        begin = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - begin - backend.seconds) * 1e6)
    times.sort()
    return statistics.median(times), statistics.fmean(times), times[int(len(times) * 0.99)]


def waiting_engine(policy: str, waiting: int) -> Engine:
    """An engine of which 64 sequences run and ``waiting`` wait."""
    backend = NullBackend()
    config = EngineConfig(num_blocks=backend.num_blocks, max_model_len=8192, max_num_seqs=64, policy=policy)
    engine = Engine(config, backend)
    params = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
    for number in range(64 + waiting):
        prompt = np.arange(number, number + 100 + number % 50, dtype=np.int32) % 40_000
        tenant = f"tenant {number}" if policy == "fair" else None
        priority = number % 7 if policy == "priority" else 0
        engine.add(EngineRequest(f"r{number}", prompt, params, eos_ids=(2,), tenant=tenant, priority=priority))
    while engine.stats().running < 64:
        engine.step()
    for _ in range(20):
        engine.step()
    gc.collect()
    return engine


def scheduling(engine: Engine, steps: int, *, ending: bool) -> tuple[float, float]:
    """Median and 99th percentile of a step's scheduling; ``ending`` ends the oldest sequence before each."""
    times = []
    for _ in range(steps):
        if ending:
            engine.abort(engine.scheduler.running[0].request_id)
        engine.step()
        times.append(engine.stats().schedule_seconds * 1e6)
    times.sort()
    return statistics.median(times), times[int(len(times) * 0.99)]


def prefix_cache(blocks: int) -> tuple[float, float]:
    """Median scheduling of a step that admits a prompt of 256 blocks: found in a cache of ``blocks``, and not."""
    length = 4096
    backend = NullBackend()
    backend.num_blocks = blocks + 4 * length // 16
    config = EngineConfig(num_blocks=backend.num_blocks, max_model_len=8192, max_num_seqs=64)
    engine = Engine(config, backend)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    chance = np.random.default_rng(blocks)
    prompts = []

    def run(prompt: np.ndarray) -> float:
        engine.add(EngineRequest("one", prompt, params, eos_ids=(2,)))
        engine.step()
        spent = engine.stats().schedule_seconds * 1e6
        while engine.has_work():
            engine.step()
        return spent

    for _ in range(max(1, blocks * 16 // length)):
        prompts.append(chance.integers(10, 40_000, length, dtype=np.int32))
        run(prompts[-1])
    gc.collect()
    found = [run(prompts[place]) for place in chance.integers(0, len(prompts), 30)]
    missed = [run(chance.integers(10, 40_000, length, dtype=np.int32)) for _ in range(30)]
    return statistics.median(found), statistics.median(missed)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    print(f"{'policy':>10} {'waiting':>8} {'still us':>9} {'p99 us':>8} {'admitting us':>13} {'p99 us':>8}")
    for policy in ("fcfs", "priority", "shortest", "fair"):
        for waiting in (1, 100, 1_000, 10_000):
            engine = waiting_engine(policy, waiting)
            median, tail = scheduling(engine, arguments.steps // 4, ending=False)
            admit, admit_tail = scheduling(engine, min(200, waiting), ending=True)
            print(f"{policy:>10} {waiting:>8,} {median:>9.1f} {tail:>8.1f} {admit:>13.1f} {admit_tail:>8.1f}")
    print(f"{'cached blocks':>14} {'found us':>10} {'not found us':>13}")
    for blocks in (10_000, 100_000, 1_000_000):
        found, missed = prefix_cache(blocks)
        print(f"{blocks:>14,} {found:>10.1f} {missed:>13.1f}")
    print(f"{'batch':>6} {'cache':>6} {'median us':>10} {'mean us':>10} {'p99 us':>10}")
    for batch in (1, 8, 64, 256):
        for caching in (True, False):
            median, mean, tail = measure(batch, arguments.steps, caching)
            print(f"{batch:>6} {'on' if caching else 'off':>6} {median:>10.1f} {mean:>10.1f} {tail:>10.1f}")


if __name__ == "__main__":
    main()
