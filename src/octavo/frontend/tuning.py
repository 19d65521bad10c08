"""Measures the tiles of a model on this machine and writes what was found where engines look for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.backends.cpu.tiles import Bucket
from octavo.backends.cpu.tuner import MOST_ROWS, Choice, StepTime, Tuner
from octavo.backends.cpu.tuning_cache import Entry, Machine, check_target, default_path, store_entries, this_machine
from octavo.errors import ConfigError
from octavo.frontend.loading import load_engine
from octavo.frontend.options import EngineOptions
from octavo.planning.hardware import probe

__all__ = ["TuningResult", "tune_model"]


@dataclass(frozen=True, slots=True)
class TuningResult:
    """What was measured, and the file it was written to."""

    machine: Machine
    path: Path
    choices: list[Choice]
    steps: list[StepTime]


def tune_model(
    model: str,
    *,
    quantization: str | None = None,
    threads: int | None = None,
    output: Path | None = None,
    seconds: float = 60.0,
    progress: Callable[[Bucket, float], None] = lambda bucket, seconds: None,
) -> TuningResult:
    """Measure for about so many seconds, after loading. `progress` is told before each bucket of rows."""
    if not seconds > 0:
        raise ConfigError(f"seconds must be above 0, got {seconds}")
    options = EngineOptions(
        model=model, quantization=quantization, threads=threads, max_num_batched_tokens=MOST_ROWS, tuning="off"
    )
    loaded = load_engine(options, with_tokenizer=False)
    try:
        machine = this_machine(probe().cpu_model, loaded.isa, loaded.threads)
        path = output or default_path(machine.cpu, machine.isa, machine.threads)
        check_target(path, named=output is not None)
        backend = loaded.backend
        tuner = Tuner(backend.plan, max_model_len=loaded.max_model_len, num_blocks=backend.num_blocks)
        buckets = tuner.buckets()
        choices: list[Choice] = []
        steps: list[StepTime] = []
        for bucket in buckets:
            share = seconds / len(buckets)
            progress(bucket, share)
            found, times = tuner.measure(bucket, share)
            choices += found
            steps += times
    finally:
        loaded.close()
    store_entries(path, machine, [Entry(each.shape, *each.bucket, each.tile, round(each.ratio, 4)) for each in choices])
    return TuningResult(machine, path, choices, steps)
