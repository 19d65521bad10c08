"""The work peers.py measures: which figures, at what target, from which pieces of work, and how long a run takes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers_engines import Engines, Form, Worker, llama, start_seconds

from octavo.benchmarking.workload import single_token_words

__all__ = ["GROUPS", "Group", "Row", "Words", "measure"]

Piece = dict[str, Any]
_REPEATS = 2  # of quick work in one process


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of the comparison.

    ``targets`` are ratios to the best peer of the class by bits of weight; where less is better (``lower``) the ratio
    must not be above it. ``absolute`` is a figure to reach whatever the peers do. ``smallest`` compares with the best
    peer of any class. A ``steady`` figure hardly varies: one round of a peer is enough.
    """

    key: str
    title: str
    unit: str
    targets: Mapping[int, float] = field(default_factory=dict)
    lower: bool = False
    absolute: float | None = None
    smallest: bool = False
    steady: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Figures that come out of the same run. ``seconds`` of a run by engine are for the estimate only."""

    key: str
    rows: tuple[Row, ...]
    seconds: Mapping[str, float]
    large: bool = False  # the 1B shape instead of the small model
    quick: bool = True  # measured in more rounds than long work
    requests: int = 64

    def runs(self, form: Form) -> bool:
        """Whether this form takes part."""
        avx2 = bool(form.isa) or "AVX2" in form.engine
        if avx2 != (self.key == "avx2"):
            return False
        if form.quick_only and self.key != "quick":
            return False
        return form.engine in self.seconds


_EACH = {4: 2.0, 8: 2.0, 16: 2.0}
_BATCH = "requests of 256 in and 64 out"
GROUPS = (
    Group(
        "quick",
        (
            Row("decode", "decode, batch 1, 128 tokens after 128", "tok/s", {4: 1.6, 8: 1.5, 16: 1.2}),
            Row("prefill", "prefill of 1024", "tok/s", {8: 1.6, 16: 1.15}),
        ),
        {"octavo": 7, "llama.cpp": 11, "openvino": 9, "vllm": 14},
    ),
    Group(
        "batch",
        (
            Row("batch", f"64 {_BATCH}", "total tok/s", _EACH),
            Row("memory", f"peak memory at 64 {_BATCH}", "MiB", lower=True, smallest=True, steady=True),
        ),
        {"octavo": 14, "llama.cpp": 31, "openvino": 19, "vllm": 18},
        quick=False,
    ),
    Group(
        "prefix",
        (
            Row("cold", "64 requests of a shared 512 prefix and 32 own in, 64 out, cold", "output tok/s", _EACH),
            Row("primed", "the same after one request with that prefix", "output tok/s", _EACH),
        ),
        {"octavo": 12, "openvino": 48, "vllm": 18},
        quick=False,
    ),
    Group(
        "1b",
        (
            Row("1b decode", "1B shape: decode", "tok/s", dict.fromkeys(_EACH, 1.15)),
            Row("1b prefill", "1B shape: prefill of 1024", "tok/s", dict.fromkeys(_EACH, 1.5)),
            Row("1b batch", f"1B shape: 16 {_BATCH}", "total tok/s", dict.fromkeys(_EACH, 1.6)),
        ),
        {"octavo": 45, "llama.cpp": 70, "openvino": 50, "vllm": 60},
        large=True,
        quick=False,
        requests=16,
    ),
    Group(
        "start",
        (Row("start", "command to first token, model present", "s", lower=True, absolute=0.6),),
        {"octavo": 1.5, "llama.cpp": 1.5, "openvino": 4, "vllm": 90},
    ),
    Group(
        "avx2",
        (
            Row("avx2 prefill", "AVX2 only: prefill of 1024", "tok/s", dict.fromkeys(_EACH, 1.0)),
            Row("avx2 batch", f"AVX2 only: 64 {_BATCH}", "total tok/s", dict.fromkeys(_EACH, 1.0)),
        ),
        {"octavo": 25, "llama.cpp (AVX2)": 45},
        quick=False,
    ),
)


class Words:
    """Prompts of token ids: random words that are one token each; the same for the same seed."""

    def __init__(self, tokenizer: Any) -> None:
        self._ids = [
            tokenizer.encode(" " + word, add_special_tokens=False)[0] for word in single_token_words(tokenizer)
        ]

    def ids(self, count: int, seed: str) -> list[int]:
        """``count`` tokens."""
        return random.Random(seed).choices(self._ids, k=count)


# --- pieces of work ---------------------------------------------------------------------------------------------------


def _one(name: str, prompts: list[list[int]], tokens: int, before: list[list[list[int]]] | None = None) -> Piece:
    return {"name": name, "before": before or [], "prompts": prompts, "tokens": tokens}


def _decode(words: Words, seed: str, repeats: int) -> Iterator[Piece]:
    for number in range(repeats):
        for name, tokens in (("short", 1), ("long", 129)):
            yield _one(f"{name} {number}", [words.ids(128, f"{seed} {name} {number}")], tokens)


def _prefill(words: Words, seed: str, repeats: int) -> Iterator[Piece]:
    for number in range(repeats):
        yield _one(f"prefill {number}", [words.ids(1024, f"{seed} prefill {number}")], 1)


def _batch(words: Words, seed: str, requests: int) -> Iterator[Piece]:
    yield _one("batch", [words.ids(256, f"{seed} batch {number}") for number in range(requests)], 64)


def _prefix(words: Words, seed: str, requests: int) -> Iterator[Piece]:
    for name in ("cold", "primed"):
        shared = words.ids(512, f"{seed} {name}")
        prompts = [shared + words.ids(32, f"{seed} {name} {number}") for number in range(requests)]
        yield _one(name, prompts, 64, [[shared + words.ids(32, f"{seed} first")]] if name == "primed" else [])


def _pieces(group: Group, words: Words, seed: str) -> list[Piece]:
    if group.key == "quick":
        return [*_decode(words, seed, _REPEATS), *_prefill(words, seed, _REPEATS)]
    if group.key == "1b":
        return [*_decode(words, seed, _REPEATS), *_prefill(words, seed, _REPEATS), *_batch(words, seed, group.requests)]
    if group.key == "avx2":
        return [*_prefill(words, seed, _REPEATS), *_batch(words, seed, group.requests)]
    return list({"batch": _batch, "prefix": _prefix}[group.key](words, seed, group.requests))


def _row_of(piece: Piece) -> str:
    """The row that a piece of work is for."""
    name: str = piece["name"].partition(" ")[0]
    return {"short": "decode", "long": "decode"}.get(name, name)


def _figures(seconds: Mapping[str, float], requests: int) -> dict[str, float]:
    """The figures that pieces of work give."""
    found: dict[str, float] = {}
    repeats = [name.removeprefix("short ") for name in seconds if name.startswith("short ")]
    if repeats:
        found["decode"] = statistics.median(128 / (seconds[f"long {n}"] - seconds[f"short {n}"]) for n in repeats)
    if "prefill 0" in seconds:
        found["prefill"] = statistics.median(
            1024 / each for name, each in seconds.items() if name.startswith("prefill")
        )
    if "batch" in seconds:
        found |= {"batch": requests * 320 / seconds["batch"], "memory": seconds["peak_bytes"] / 2**20}
    for name in ("cold", "primed"):
        if name in seconds:
            found[name] = requests * 64 / seconds[name]
    return found


# --- one run ----------------------------------------------------------------------------------------------------------

_LLAMA_WORK: Mapping[str, Sequence[str]] = {
    "quick": ("decode", "prefill"),
    "batch": ("batch",),
    "1b": ("decode", "prefill", "batch"),
    "avx2": ("prefill", "batch"),
}


def measure(
    group: Group,
    form: Form,
    engines: Engines,
    words: Words,
    seed: str,
    *,
    rows: Collection[str],
    worker: Callable[[Form], tuple[Worker, bool]],
    log: set[str],
) -> dict[str, float]:
    """Run ``form`` once on the work of ``group`` that gives ``rows``: a figure for each row it has.

    ``worker`` gives a started engine and whether it is to be closed afterwards.
    """
    if group.key == "start":
        seconds = start_seconds(form, engines, log)
        return {} if seconds is None else {"start": seconds}
    prefix = f"{group.key} " if group.key in ("1b", "avx2") else ""
    wanted = {row.removeprefix(prefix) for row in rows}
    if form.engine.startswith("llama.cpp"):
        figures: dict[str, float] = {}
        for what in (what for what in _LLAMA_WORK[group.key] if what in wanted):
            done = llama(form, engines, what, group.requests, log)
            figures |= {what: done[what], "memory": done["peak_bytes"] / 2**20}
    else:
        process, close = worker(form)
        try:
            figures = _figures(
                process.do([piece for piece in _pieces(group, words, seed) if _row_of(piece) in wanted]), group.requests
            )
        finally:
            if close:
                process.close()
    keys = {row.key for row in group.rows}
    return {prefix + name: value for name, value in figures.items() if prefix + name in keys}
