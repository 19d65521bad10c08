"""Offers a server ten times what it can do: does it still do as much, and is every refusal typed?

    python benchmarks/overload.py [--rounds 3] [--seconds 25] [--limit 64] [--factor 10]

First the peak is looked for, with closed loops of 8 to --limit clients. Then three loads take turns: the best closed
loop; requests that arrive at random, --factor times as many a second as the peak serves; and --factor times --limit
clients in a closed loop who come back as soon as Retry-After lets them. Throughput is that of the output tokens which
arrive between --warm seconds after the start and the end. The clients run on the same cores; their processor time is
recorded. The run fails when throughput under overload is below 90 % of the peak, or a refusal is not a 429 with a type
and Retry-After.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop
from http_client import Address
from load_generator import Load, Request, bodies, percentile, prompts_of_words, stream
from recording import RESULTS, about_model, dashed, provenance, write
from server_process import ServerProcess, cpu_seconds

from octavo.frontend.tokenizer import load_tokenizer
from octavo.weights.hub import resolve_model

_PROMPTS = 512
_LEAST_SHARE = 0.9
_PATIENCE = 1.0  # seconds a client waits that is refused without being told how long


async def closed_loop(address: Address, work: Iterator[bytes], clients: int, seconds: float) -> list[Request]:
    """Clients with one request at a time each, until the time is over; the last answers are waited for."""
    done: list[Request] = []
    ends = time.perf_counter() + seconds

    async def client(number: int) -> None:
        await asyncio.sleep(number * 0.001)
        while time.perf_counter() < ends:
            request = await stream(address, next(work))
            done.append(request)
            if request.error is not None:
                left = ends - time.perf_counter()
                await asyncio.sleep(max(0.0, min(request.retry_after or _PATIENCE, left)))

    await asyncio.gather(*(client(number) for number in range(clients)))
    return done


async def arrivals(address: Address, work: Iterator[bytes], rate: float, seconds: float, seed: int) -> list[Request]:
    """Requests at random, ``rate`` a second, whatever becomes of those before."""
    chance = random.Random(seed)
    began = due = time.perf_counter()
    tasks = []
    while due < began + seconds:
        tasks.append(asyncio.create_task(stream(address, next(work))))
        due += chance.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    return list(await asyncio.gather(*tasks))


def summary(done: Sequence[Request], began: float, warm: float, seconds: float) -> dict[str, Any]:
    """What a load came to; throughput inside the window."""
    start, end = began + warm, began + seconds
    served = [request for request in done if request.error is None]
    refused = [request for request in done if request.error is not None]
    untyped = [request for request in refused if not _is_typed_refusal(request)]
    inside = sum(start <= at < end for request in done for at in request.text_times)
    waits = [request.ended - request.began for request in refused]
    first = [request.text_times[0] - request.began for request in served]
    return {
        "served": len(served),
        "refused": len(refused),
        "output_tok_per_s": inside / (end - start),
        "ttft_p50_ms": percentile(first, 50) * 1000 if first else None,
        "refusal_p50_ms": percentile(waits, 50) * 1000 if waits else None,
        "refusal_p99_ms": percentile(waits, 99) * 1000 if waits else None,
        "not_typed": [f"{request.status} {request.error}" for request in untyped][:5],
        "not_typed_count": len(untyped),
    }


def _is_typed_refusal(request: Request) -> bool:
    return request.status == 429 and request.error_type is not None and request.retry_after is not None


def _client(options: argparse.Namespace) -> None:
    """One load, in a process of its own: its processor time is the clients' alone."""
    address = Address.of(options.url)
    shape = Load("", _PROMPTS, 1, options.input_len, options.output_len)
    texts = prompts_of_words(load_tokenizer(resolve_model(options.model)), shape, options.seed)
    work = itertools.cycle(bodies("m", texts, options.output_len))
    used, began = _own_cpu_seconds(), time.perf_counter()
    if options.rate > 0:
        done = uvloop.run(arrivals(address, work, options.rate, options.seconds, options.seed))
    else:
        done = uvloop.run(closed_loop(address, work, options.clients, options.seconds))
    used = _own_cpu_seconds() - used
    found = summary(done, began, options.warm, options.seconds)
    share = used / ((time.perf_counter() - began) * len(os.sched_getaffinity(0)))
    found |= {"client_cpu_s": used, "net_output_tok_per_s": found["output_tok_per_s"] / (1 - share)}
    print(json.dumps(found))


def _own_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Bench:
    """Starts loads against one server."""

    def __init__(self, server: ServerProcess, options: argparse.Namespace) -> None:
        self.server, self.options = server, options
        self.numbers = itertools.count(1)

    def load(self, name: str, *, clients: int = 0, rate: float = 0.0) -> dict[str, Any]:
        options = self.options
        words = [sys.executable, __file__, "--url", self.server.address.url, "--model", options.model]
        for option in ("input_len", "output_len", "seconds", "warm"):
            words += ["--" + option.replace("_", "-"), str(getattr(options, option))]
        words += [
            "--clients",
            str(clients),
            "--rate",
            str(rate),
            "--seed",
            str(options.seed * 1000 + next(self.numbers)),
        ]
        before = cpu_seconds(self.server.tree())
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(
                f"a load ended with {done.returncode}:\n{done.stderr[-2000:]}\n{self.server.log()[-2000:]}"
            )
        found: dict[str, Any] = json.loads(done.stdout)
        found |= {"clients": clients, "rate": rate, "server_cpu_s": cpu_seconds(self.server.tree()) - before}
        print(
            f"{name}: {found['output_tok_per_s']:.0f} tokens/s, {found['served']} served, {found['refused']} refused",
            flush=True,
        )
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=25.0, help="length of each load")
    parser.add_argument("--warm", type=float, default=8.0, help="seconds before throughput is counted")
    parser.add_argument("--limit", type=int, default=64, help="the server's --max-concurrent-requests")
    parser.add_argument("--factor", type=float, default=10.0, help="how many times too much is offered")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file to write; else one in benchmarks/results")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--clients", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.url is not None:
        _client(options)
        return
    record = {"what": "overload", **provenance(["uvicorn", "starlette", "msgspec"])}
    with ServerProcess.octavo(
        "--max-model-len", "2048", "--max-concurrent-requests", str(options.limit), model=options.model
    ) as server:
        measured = _measure(Bench(server, options), options)
    record |= {
        name: getattr(options, name) for name in ("seconds", "warm", "limit", "factor", "input_len", "output_len")
    }
    record |= about_model(options.model)
    record |= measured
    path = options.json or RESULTS / dashed(f"overload {record['date'][:10]}.json")
    write(record, path)
    faults = _faults(measured)
    for name, share in measured["share_of_peak"].items():
        net = measured["net_share_of_peak"][name]
        print(f"{name}: {share:.1%} of the peak, net {net:.1%}")
    print("\n".join(faults) if faults else "every refusal a 429 with type and Retry-After")
    print(f"written to {path}")
    sys.exit(1 if faults else 0)


def _measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    bench.load("warming up", clients=4)
    levels = [clients for clients in (8, 16, 32, 48, 64, 96, 128) if clients <= options.limit] or [options.limit]
    search = {clients: bench.load(f"{clients} clients", clients=clients) for clients in levels}
    best = max(search, key=lambda clients: float(search[clients]["output_tok_per_s"]))
    rate = options.factor * search[best]["output_tok_per_s"] / options.output_len
    many = max(round(options.factor * best), 2 * options.limit)
    runs: dict[str, list[dict[str, Any]]] = {"peak": [], "arrivals": [], "clients": []}
    for number in range(options.rounds):
        loads = [("peak", {"clients": best}), ("arrivals", {"rate": rate}), ("clients", {"clients": many})]
        for name, shape in loads if number % 2 == 0 else reversed(loads):
            runs[name].append(bench.load(f"round {number + 1}, {name} {shape}", **shape))
    measured: dict[str, Any] = {"search": {str(clients): found for clients, found in search.items()}, "rounds": runs}
    for figure, share in (("output_tok_per_s", "share_of_peak"), ("net_output_tok_per_s", "net_share_of_peak")):
        rates = {name: statistics.median(run[figure] for run in found) for name, found in runs.items()}
        measured |= {figure: rates, share: {name: rates[name] / rates["peak"] for name in ("arrivals", "clients")}}
    return measured


def _faults(measured: dict[str, Any]) -> list[str]:
    found = [
        f"{name}: net {share:.1%} of the peak is less than {_LEAST_SHARE:.0%}"
        for name, share in measured["net_share_of_peak"].items()
        if share < _LEAST_SHARE
    ]
    for name, runs in measured["rounds"].items():
        count = sum(run["not_typed_count"] for run in runs)
        if count:
            found.append(f"{name}: {count} refusals that are not typed, such as {runs[0]['not_typed'][:2]}")
        if name != "peak" and not sum(run["refused"] for run in runs):
            found.append(f"{name}: nothing was refused: that was no overload")
    return found


if __name__ == "__main__":
    main()
