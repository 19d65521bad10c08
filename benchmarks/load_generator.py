"""Loads an OpenAI-compatible server with streams and measures what its clients see: TTFT, TPOT, requests and tokens/s.

    python benchmarks/load_generator.py --url http://127.0.0.1:8000 --model NAME [--requests 128] [--concurrency 32]
           [--input-len 256] [--output-len 64] [--shared-prefix 0] [--rate 0]

A closed loop of --concurrency clients, each with one request at a time; with --rate, requests arrive at random
(Poisson) that many a second, with at most --concurrency in flight. Prompts are random words, each one token of the
model's tokenizer. Every request goes over a connection of its own, for some servers close kept ones under load.

TTFT is the time from sending a request to the first event with text. TPOT is the time from the first to the last such
event over the output tokens after the first, one value a request. ITL is the time between two such events.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import uvloop
from http_client import Address, Connection, ProtocolError, call, events

from octavo.benchmarking.workload import single_token_words
from octavo.frontend.options import DEFAULT_MODEL
from octavo.frontend.tokenizer import Tokenizer, load_tokenizer
from octavo.weights.hub import resolve_model

__all__ = ["LOADS", "Load", "Request", "bodies", "drive", "figures", "percentile", "prompts_of_words", "stream"]


@dataclass(frozen=True, slots=True)
class Load:
    """How a server is loaded. Lengths are in tokens, ``rate`` in requests a second (0: a closed loop)."""

    name: str
    requests: int
    concurrency: int
    input_len: int
    output_len: int
    shared_prefix: int = 0
    rate: float = 0.0


LOADS = {
    load.name: load
    for load in (
        Load("c32", 128, 32, 256, 64),
        Load("c1", 4, 1, 128, 128),
        Load("prefix_c32", 64, 32, 32, 64, shared_prefix=512),
    )
}


@dataclass(slots=True)
class Request:
    """What became of one request; times are in seconds of ``time.perf_counter``."""

    began: float = 0.0
    ended: float = 0.0
    text_times: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    status: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    error_type: str | None = None
    retry_after: float | None = None

    @property
    def tokens(self) -> int:
        """Output tokens as the server counted them, else the events with text."""
        return self.output_tokens or len(self.text_times)


class _Choice(msgspec.Struct):
    text: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


def prompts_of_words(tokenizer: Tokenizer, load: Load, seed: int) -> list[str]:
    """Texts of exactly the load's lengths in tokens; equal seeds give equal texts, others give others."""
    words = single_token_words(tokenizer)
    if len(words) < 16:
        raise SystemExit("this tokenizer has too few words of one token: lengths would not be exact")
    prefix = random.Random(f"prefix {seed}").choices(words, k=load.shared_prefix)
    return [
        " ".join(prefix + random.Random(f"{seed}/{number}").choices(words, k=load.input_len))
        for number in range(load.requests)
    ]


def bodies(model: str, texts: Sequence[str], output_len: int) -> list[bytes]:
    """Greedy streaming requests of exactly ``output_len`` tokens, as servers of the OpenAI dialect take them."""
    return [
        json.dumps(
            {
                "model": model,
                "prompt": text,
                "max_tokens": output_len,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        for text in texts
    ]


async def stream(address: Address, body: bytes, path: str = "/v1/completions", *, timeout: float = 900.0) -> Request:
    """Send one streaming completion and read it to its end. Never raises for what the server does."""
    request = Request(began=time.perf_counter())
    try:
        async with asyncio.timeout(timeout), await Connection.open(address) as connection:
            await connection.send("POST", path, body)
            request.status = await connection.head()
            if request.status == 200:
                await _read(connection, request)
            else:
                await _refused(connection, request)
    except (OSError, ProtocolError, ValueError, msgspec.MsgspecError) as error:
        request.error = f"{type(error).__name__}: {error}"
    request.ended = time.perf_counter()
    return request


async def _read(connection: Connection, request: Request) -> None:
    done = False
    async for data in events(connection):
        if data == b"[DONE]":
            done = True
            continue
        event = _decode_event(data)
        if event.error is not None:
            request.error = str(event.error)[:200]
        if event.usage is not None:
            request.prompt_tokens, request.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        if event.choices and event.choices[0].text:
            request.text_times.append(time.perf_counter())
            request.text.append(event.choices[0].text)
    if request.error is None and not (done and request.text_times):
        request.error = "the stream ended without [DONE]" if not done else "an answer without text"


async def _refused(connection: Connection, request: Request) -> None:
    body = await connection.body()
    request.error = f"HTTP {request.status} {body[:200].decode(errors='replace')}"
    after = connection.headers.get("retry-after")
    request.retry_after = float(after) if after is not None and after.replace(".", "", 1).isdigit() else None
    try:
        error = json.loads(body)["error"]
        request.error_type = error["type"] if isinstance(error, dict) else None
    except (ValueError, LookupError, TypeError):
        request.error_type = None


async def drive(address: Address, load: Load, requests: Sequence[bytes], seed: int = 0) -> tuple[list[Request], float]:
    """Run a load; what became of each request, and the seconds it took."""
    began = time.perf_counter()
    if load.rate > 0:
        done = await _arrivals(address, load, requests, random.Random(seed))
    else:
        done = []
        pending = iter(requests)

        async def client() -> None:
            for body in pending:
                done.append(await stream(address, body))

        await asyncio.gather(*(client() for _ in range(load.concurrency)))
    return done, time.perf_counter() - began


async def _arrivals(address: Address, load: Load, requests: Sequence[bytes], chance: random.Random) -> list[Request]:
    places = asyncio.Semaphore(load.concurrency)

    async def one(body: bytes) -> Request:
        async with places:
            return await stream(address, body)

    tasks = []
    due = time.perf_counter()
    for body in requests:
        tasks.append(asyncio.create_task(one(body)))
        due += chance.expovariate(load.rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    return list(await asyncio.gather(*tasks))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` percent lie, interpolated between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def figures(load: Load, done: Sequence[Request], seconds: float) -> dict[str, Any]:
    """The measurements of one run; times in milliseconds unless named otherwise."""
    good = [request for request in done if request.error is None]
    prompt = sum(request.prompt_tokens or load.input_len + load.shared_prefix for request in good)
    output = sum(request.tokens for request in good)
    later = [request for request in good if request.tokens > 1]
    gaps = [b - a for request in good for a, b in itertools.pairwise(request.text_times)]
    return asdict(load) | {
        "ok": len(good),
        "failed": len(done) - len(good),
        "errors": sorted({request.error for request in done if request.error is not None})[:5],
        "wall_s": seconds,
        "req_per_s": len(good) / seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tok_per_s": output / seconds,
        "total_tok_per_s": (prompt + output) / seconds,
        "ttft_ms": _spread([request.text_times[0] - request.began for request in good]),
        "tpot_ms": _spread(
            [(request.text_times[-1] - request.text_times[0]) / (request.tokens - 1) for request in later]
        ),
        "itl_ms": _spread(gaps),
        "e2e_ms": _spread([request.ended - request.began for request in good]),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    shares = {f"p{share}": percentile(seconds, share) * 1000 for share in (50, 90, 99)}
    return {"mean": sum(seconds) / len(seconds) * 1000, **shares, "max": max(seconds) * 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="the model's name at the server")
    parser.add_argument("--tokenizer", default=DEFAULT_MODEL, help="model whose tokens the lengths count")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--shared-prefix", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--warmup", type=int, default=2, help="requests before the measurement")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    load = Load(
        "", options.requests, options.concurrency, options.input_len, options.output_len, options.shared_prefix,
        options.rate,
    )  # fmt: skip
    tokenizer = load_tokenizer(resolve_model(options.tokenizer))
    work = bodies(options.model, prompts_of_words(tokenizer, load, options.seed), load.output_len)
    warm = Load("", options.warmup, 1, load.input_len, load.output_len)
    warmup = bodies(options.model, prompts_of_words(tokenizer, warm, options.seed + 1_000_000), load.output_len)

    async def run() -> dict[str, Any]:
        address = Address.of(options.url)
        models = await call(address, "GET", "/v1/models")
        if models.status != 200:
            raise SystemExit(f"/v1/models answers {models.status}")
        await drive(address, warm, warmup)
        used = _own_cpu_seconds()
        done, seconds = await drive(address, load, work, options.seed)
        return figures(load, done, seconds) | {"client_cpu_s": _own_cpu_seconds() - used}

    print(json.dumps(uvloop.run(run())))


def _own_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
