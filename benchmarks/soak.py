"""Runs a server for half an hour under mixed load, kills its engine again and again, and compares every answer.

    python benchmarks/soak.py [--minutes 30] [--kill-every 120] [--clients 24] [--seed 1]

The clients ask, in every dialect, streaming and not, questions whose answers an undisturbed engine gave beforehand:
greedy and seeded, with n = 2, stop strings and log-probabilities. Some leave in the middle, some read slowly, some
send bad requests. Every --kill-every seconds the engine process gets SIGKILL. The run fails when an answer is wrong or
lost, a bad request gets anything but a refusal, memory rises, or a gauge is not back at 0 after the end.

Memory is what a process has of its own (files mapped are left out). The front end's slope is that of a straight line
through the samples after the first quarter; each engine lives for --kill-every seconds, so for the engines the sizes
at the end of each life are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import uvloop
from bad_requests import BadRequest, bad_requests, send
from http_client import ProtocolError, call
from known_answers import Asked, Behaviour, Expected, Question, ask, expected_answers, heavy_questions, questions, wrong
from load_generator import percentile
from recording import RESULTS, about_model, dashed, provenance, write
from server_process import ServerProcess, anonymous_bytes

_MEBIBYTE = 1 << 20
_SHOWN = 30
_SETTLE_SECONDS = 30.0
_HEAVY = 16
# Readers are paused early and the KV cache is small, so that pauses and preemptions happen often.
_SERVER_OPTIONS = (
    *("--max-model-len", "2048", "--max-unread-tokens", "32"),
    *("--num-gpu-blocks-override", "160"),
)

# Gauges that count what is going on: all of them are 0 when nothing is.
_GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "paused",
    "queue_size",
    "batch_current_size",
)


class Soak:
    """The run: clients, the killer and the watcher, and what they saw."""

    def __init__(
        self,
        server: ServerProcess,
        options: argparse.Namespace,
        asked: Sequence[Question],
        expected: Sequence[Expected],
    ) -> None:
        self.server, self.options, self.asked, self.expected = server, options, asked, expected
        self.heavy = asked[-_HEAVY:]
        self.address = server.address
        self.began = self.ends = time.monotonic()
        self.counts: collections.Counter[str] = collections.Counter()
        self.statuses: collections.Counter[int] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self.kills: list[dict[str, Any]] = []
        self.samples: list[dict[str, float]] = []
        self.health_ms: list[float] = []
        self.health_statuses: collections.Counter[int] = collections.Counter()
        self.in_flight = 0

    def _start_clock(self) -> None:
        self.began = time.monotonic()
        self.ends = self.began + self.options.minutes * 60

    def _left(self) -> float:
        return float(self.ends - time.monotonic())

    async def run(self) -> None:
        """Until the time is over and the last answers are in.

        Every bad request comes twice before the clock starts: the largest make the allocator take memory that it keeps
        for the next ones, and as they are rare this would look like growth.
        """
        pending = iter([make for make in bad_requests(self.options.seed) for _ in range(2)])

        async def warm() -> None:
            for make in pending:
                await self._send_bad(make())

        await asyncio.gather(*(warm() for _ in range(64)))
        self._start_clock()
        tasks = [asyncio.create_task(self._client(number)) for number in range(self.options.clients)]
        helpers = [asyncio.create_task(self._watch()), asyncio.create_task(self._kill())]
        await asyncio.gather(*tasks)
        await asyncio.gather(*helpers)

    # -- clients

    async def _client(self, number: int) -> None:
        chance = random.Random(f"{self.options.seed} {number}")
        makers = list(bad_requests(self.options.seed * 1000 + number))
        while self._left() > 0:
            kind = chance.choices(
                ("right", "leaves", "leaves at once", "reads slowly", "bad"), weights=(58, 14, 4, 8, 16)
            )[0]
            if kind == "bad":
                await self._send_bad(chance.choice(makers)())
                continue
            question = chance.choice(self.heavy if kind == "reads slowly" else self.asked)
            behaviour = Behaviour()
            if kind == "leaves":
                behaviour = Behaviour(abort_after=chance.randrange(1, 20))
            elif kind == "leaves at once":
                behaviour = Behaviour(abort_after=0)
            elif kind == "reads slowly":
                behaviour = Behaviour(pause=chance.choice((0.03, 0.1)))
            self.in_flight += 1
            answer = await ask(self.address, question, self.server.model, behaviour)
            self.in_flight -= 1
            self._judge(question, kind, answer)

    async def _send_bad(self, request: BadRequest) -> None:
        outcome = await send(self.address, request)
        self.counts["bad"] += 1
        self.statuses[outcome.status] += 1
        if outcome.wrong is not None:
            self._fault(f"bad request, {outcome.name}: {outcome.wrong}")

    def _judge(self, question: Question, kind: str, answer: Asked) -> None:
        self.counts[f"{question.form} {kind}"] += 1
        self.counts["whole answers compared" if answer.whole else "answers the client cut short"] += 1
        problem = wrong(question, self.expected[question.number], answer)
        if problem is not None:
            self._fault(f"question {question.number} ({question.form}, client {kind}): {problem}")

    def _fault(self, text: str) -> None:
        if not self.faults[text]:
            print(f"{time.monotonic() - self.began:7.1f} s: {text}", flush=True)
        self.faults[text] += 1

    # -- disturbance

    async def _kill(self) -> None:
        while self._left() > self.options.kill_every / 2:
            await asyncio.sleep(min(self.options.kill_every, max(0.0, self._left())))
            if self._left() <= 0:
                return
            engine = self.server.engine()
            if engine is None:
                self._fault("there is no engine process to kill")
                continue
            size = anonymous_bytes(engine.pid)
            engine.send_signal(signal.SIGKILL)
            began = time.monotonic()
            kill = {"after_s": began - self.began, "pid": engine.pid, "engine_bytes": size, "in_flight": self.in_flight}
            kill["back_after_s"] = await self._new_engine(engine.pid, began)
            self.kills.append(kill)
            print(
                f"{kill['after_s']:7.1f} s: killed the engine with {kill['in_flight']} in flight; a new one after "
                f"{kill['back_after_s']:.2f} s",
                flush=True,
            )

    async def _new_engine(self, old: int, began: float) -> float:
        """Seconds until there is another engine process that has loaded the model, at most a minute."""
        while time.monotonic() - began < 60:
            new = self.server.engine()
            if new is not None and new.pid != old and (anonymous_bytes(new.pid) or 0) > 16 * _MEBIBYTE:
                answer = await call(self.address, "GET", "/health", timeout=30)
                if answer.status == 200:
                    return time.monotonic() - began
            await asyncio.sleep(0.05)
        self._fault("no new engine within a minute of a kill")
        return time.monotonic() - began

    async def _watch(self) -> None:
        while self._left() > 0:
            began = time.perf_counter()
            try:
                status = (await call(self.address, "GET", "/health", timeout=10)).status
            except (OSError, ProtocolError) as error:
                status = 0
                self._fault(f"/health: {error!r}")
            self.health_ms.append((time.perf_counter() - began) * 1000)
            self.health_statuses[status] += 1
            self._sample()
            await asyncio.sleep(min(5.0, max(0.0, self._left())))

    def _sample(self) -> None:
        engine = self.server.engine()
        self.samples.append(
            {
                "after_s": round(time.monotonic() - self.began, 1),
                "front_end_bytes": anonymous_bytes(self.server.pid) or 0,
                "engine_bytes": (anonymous_bytes(engine.pid) if engine is not None else None) or 0,
                "open_files": _open_files(self.server.pid),
            }
        )

    # -- the end

    async def settle(self) -> dict[str, float]:
        """Wait for the gauges to be 0; what they are in the end."""
        until = time.monotonic() + _SETTLE_SECONDS
        while True:
            found = {name: value for name, value in (await self.metrics()).items() if _is_gauge(name)}
            if not any(found.values()) or time.monotonic() > until:
                break
            await asyncio.sleep(0.5)
        for name, value in found.items():
            if value:
                self._fault(f"{name} is {value} in the end")
        if not found:
            self._fault("/metrics has none of the gauges")
        return found

    async def metrics(self) -> dict[str, float]:
        """The samples of /metrics, by name with labels."""
        answer = await call(self.address, "GET", "/metrics", timeout=30)
        found = {}
        for line in answer.body.decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found


def _is_gauge(name: str) -> bool:
    plain = name.partition("{")[0]
    return any(gauge in plain for gauge in _GAUGES) and not plain.endswith(
        ("_total", "_bucket", "_sum", "_count", "_created")
    )


def _open_files(pid: int) -> int:
    try:
        return int(psutil.Process(pid).num_fds())
    except psutil.Error:
        return 0


def slope(samples: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Bytes an hour of the straight line through the samples after the first quarter of the time."""
    start = samples[-1]["after_s"] / 4 if samples else 0.0
    points = [(sample["after_s"], sample[name]) for sample in samples if sample["after_s"] >= start]
    if len(points) < 8:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope * 3600


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kill-every", type=float, default=120.0, help="seconds between two kills of the engine")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slope-mib", type=float, default=16.0, help="most the front end may grow, in MiB an hour")
    parser.add_argument("--json", type=Path, help="file to write; else one in benchmarks/results")
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    record = {"what": "soak", **provenance(["uvicorn", "starlette", "msgspec", "websockets"])}
    asked = questions(options.questions, options.seed)
    asked += heavy_questions(_HEAVY, options.seed, first=len(asked))
    expected = expected_answers(options.model, asked, max_model_len=2048)
    print(f"{len(asked)} questions with known answers; {options.minutes} minutes", flush=True)
    with ServerProcess.octavo(*_SERVER_OPTIONS, model=options.model) as server:
        soak = Soak(server, options, asked, expected)
        uvloop.run(soak.run())
        gauges = uvloop.run(soak.settle())
        counters = {name: value for name, value in uvloop.run(soak.metrics()).items() if _is_counter(name)}
        tail = server.log()[-3000:] if soak.faults else ""
        status = server.stop()
        if status != 0:
            soak.faults[f"the server ended with {status}"] += 1
    rise = slope(soak.samples, "front_end_bytes")
    if rise is not None and options.minutes >= 20 and rise > options.slope_mib * _MEBIBYTE:
        soak.faults[f"the front end grows by {rise / _MEBIBYTE:.1f} MiB an hour"] += 1
    lives = [kill["engine_bytes"] for kill in soak.kills if kill["engine_bytes"]]
    record |= {
        "minutes": options.minutes,
        "clients": options.clients,
        "seed": options.seed,
        "counts": dict(sorted(soak.counts.items())),
        "statuses_of_bad_requests": {str(status): count for status, count in sorted(soak.statuses.items())},
        "kills": soak.kills,
        "faults": dict(soak.faults.most_common()),
        "front_end_slope_bytes_per_hour": rise,
        "engine_bytes_at_the_end_of_each_life": lives,
        "health_ms": {"p50": percentile(soak.health_ms, 50), "max": max(soak.health_ms)},
        "health_statuses": {str(status): count for status, count in soak.health_statuses.items()},
        "gauges_at_the_end": gauges,
        "counters_at_the_end": counters,
        "samples": soak.samples,
    }
    record |= about_model(options.model)
    path = options.json or RESULTS / dashed(f"soak {record['date'][:10]}.json")
    write(record, path)
    _report(soak, record, rise, lives)
    if tail:
        print(f"end of the server's log:\n{tail}")
    print(f"written to {path}")
    sys.exit(1 if soak.faults else 0)


def _is_counter(name: str) -> bool:
    return name.partition("{")[0].endswith("_total") and name.startswith(("vllm:", "octavo:", "tgi_"))


def _report(soak: Soak, record: Mapping[str, Any], rise: float | None, lives: Sequence[int]) -> None:
    for name, count in record["counts"].items():
        print(f"{count:8} {name}")
    print(f"{len(soak.kills)} kills; bad requests by status {record['statuses_of_bad_requests']} (0: no answer)")
    if rise is not None:
        print(f"front end {rise / _MEBIBYTE:+.2f} MiB an hour")
    print("engines at the end of their lives: " + ", ".join(f"{size / _MEBIBYTE:.0f} MiB" for size in lives))
    print(f"/health: {record['health_ms']['max']:.0f} ms at most, by status {record['health_statuses']}")
    print(f"gauges at the end: {record['gauges_at_the_end']}")
    for fault, count in soak.faults.most_common(_SHOWN):
        print(f"{count:6} x {fault}")
    print("not one wrong or lost answer" if not soak.faults else f"{soak.faults.total()} faults")


if __name__ == "__main__":
    main()
