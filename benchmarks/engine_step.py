"""Measures the Python cost of an engine step in microseconds, with a back end that computes nothing."""

from __future__ import annotations

import argparse
import statistics
import time

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


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    print(f"{'batch':>6} {'cache':>6} {'median us':>10} {'mean us':>10} {'p99 us':>10}")
    for batch in (1, 8, 64, 256):
        for caching in (True, False):
            median, mean, tail = measure(batch, arguments.steps, caching)
            print(f"{batch:>6} {'on' if caching else 'off':>6} {median:>10.1f} {mean:>10.1f} {tail:>10.1f}")


if __name__ == "__main__":
    main()
