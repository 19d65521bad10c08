"""Measures what the way through HTTP costs: the same streams from an engine in the program and from a server process.

    python benchmarks/frontend_cost.py [--streams 32] [--rounds 5] [--idle 1000] [--profile FILE --py-spy PROGRAM]

The work is --streams requests at once, each of --input-len tokens in and --output-len out. It is done in turn by LLM (a
batch in the calling thread: what the engine can do), by AsyncLLM in the program, by AsyncLLM with the engine in a
process of its own, and over HTTP as server-sent events from ``octavo serve``. Every one is a process of its own that
stays loaded and idle between its turns. Reported are medians of output tokens/s over the rounds, and the cost: one
less the ratio to LLM.

The HTTP client needs the same cores as the server. It only counts bytes and events, and its processor time is reported;
"cost without the client" takes that time, spread over the cores, off the seconds that HTTP took.

Then --idle connections are opened, each has one request answered and stays open, and the server's processor time over
--idle-seconds is compared with that without them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvloop
from http_client import Address, Connection
from load_generator import Load, bodies, prompts_of_words
from recording import RESULTS, about_model, dashed, provenance, write
from server_process import ServerProcess, cpu_seconds

from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.llm import LLM
from octavo.frontend.tokenizer import load_tokenizer
from octavo.sampling.params import SamplingParams
from octavo.weights.hub import resolve_model

_IN_PROGRAM = ("llm", "async", "process")
_ALL = (*_IN_PROGRAM, "http")
_TITLES = {
    "llm": "LLM, in the program",
    "async": "AsyncLLM, in the program",
    "process": "AsyncLLM, engine in a process of its own",
    "http": "HTTP, octavo serve",
}


# --- the parties, each a process --------------------------------------------------------------------------------------


class Party:
    """A process that does the work whenever it is told a seed."""

    def __init__(self, kind: str, options: argparse.Namespace, url: str = "") -> None:
        words = [sys.executable, __file__, "--party", kind, "--url", url, "--model", options.model]
        for name in ("streams", "input_len", "output_len"):
            words += ["--" + name.replace("_", "-"), str(getattr(options, name))]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line()

    def run(self, seed: int) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        found: dict[str, float] = json.loads(self._line())
        return found

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the measurement ended with {self.process.wait()}")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _be_party(options: argparse.Namespace) -> None:
    """Load, then do the work once for each line on stdin."""
    tokenizer = load_tokenizer(resolve_model(options.model))
    shape = Load("", options.streams, options.streams, options.input_len, options.output_len)

    def texts(seed: int) -> list[str]:
        return prompts_of_words(tokenizer, shape, seed)

    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)
    if options.party == "llm":
        llm = LLM(options.model, max_model_len=2048)
        _serve_lines(lambda seed: _timed(lambda: llm.generate(texts(seed), params, use_tqdm=False)))
        llm.close()
    elif options.party == "http":
        address = Address.of(options.url)

        def over_http(seed: int) -> dict[str, float]:
            requests = bodies("m", texts(seed), options.output_len)
            return _timed(lambda: uvloop.run(_count(address, requests)))

        _serve_lines(over_http)
    else:
        more = {"separate_process": True} if options.party == "process" else {}
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            engine = runner.run(_make(options.model, more))
            _serve_lines(lambda seed: _timed(lambda: runner.run(_streams(engine, texts(seed), params))))
            runner.run(asyncio.to_thread(engine.shutdown))


def _serve_lines(work: Callable[[int], dict[str, float]]) -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(work(int(line))), flush=True)


def _timed(work: Callable[[], object]) -> dict[str, float]:
    used, began = time.process_time(), time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - used}


async def _make(model: str, more: Mapping[str, Any]) -> AsyncLLM:
    return AsyncLLM(model, max_model_len=2048, **more)


async def _streams(engine: AsyncLLM, texts: Sequence[str], params: SamplingParams) -> None:
    async def one(text: str) -> None:
        async for _ in engine.generate(text, params, output_kind="delta"):
            pass

    await asyncio.gather(*map(one, texts))


# --- a client that costs little ---------------------------------------------------------------------------------------


class _Counter(asyncio.Protocol):
    """Sends one request and counts the bytes of the answer; nothing is decoded but its end."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self._request = request
        self._ended = ended
        self._head = self._tail = b""

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._head = self._head or data[:16]
        self._tail = (self._tail + data)[-64:]

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None or b" 200 " not in self._head or b"data: [DONE]" not in self._tail:
            self._ended.set_exception(SystemExit(f"a stream failed: {error!r}, {self._head!r} ... {self._tail!r}"))
        else:
            self._ended.set_result(None)


async def _open(address: Address, request: bytes) -> asyncio.Future[None]:
    """Start a stream; the future is done when it has ended."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    await loop.create_connection(lambda: _Counter(request, ended), address.host, address.port)
    return ended


async def _count(address: Address, requests: Sequence[bytes]) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    waiting = []
    for body in requests:
        waiting.append(await _open(address, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body))
    await asyncio.gather(*waiting)


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(parties: Mapping[str, Party], server: ServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    """All parties in turn, first of all once without counting."""
    tokens = options.streams * options.output_len
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in parties}
    for number in range(-1, options.rounds):
        order = list(parties) if number % 2 == 0 else list(parties)[::-1]
        for kind in order:
            before = _split_cpu(server)
            found = parties[kind].run(options.seed * 1000 + number)
            if kind == "http":
                after = _split_cpu(server)
                found |= {f"server_{name}_cpu_s": after[name] - before[name] for name in after}
            found["output_tok_per_s"] = tokens / found["seconds"]
            if number >= 0:
                rounds[kind].append(found)
                print(f"round {number + 1}: {_TITLES[kind]}: {found['output_tok_per_s']:.0f} tokens/s", flush=True)
    return {"rounds": rounds, **_costs(rounds, tokens)}


def _split_cpu(server: ServerProcess) -> dict[str, float]:
    """Processor seconds of the front end and of everything below it."""
    tree = server.tree()
    return {"front_end": cpu_seconds(tree[:1]), "engine": cpu_seconds(tree[1:])}


def _costs(rounds: Mapping[str, Sequence[Mapping[str, float]]], tokens: int) -> dict[str, Any]:
    rates = {kind: statistics.median(run["output_tok_per_s"] for run in runs) for kind, runs in rounds.items() if runs}
    costs: dict[str, float] = {}
    if "llm" in rates:
        costs = {kind: 1 - rate / rates["llm"] for kind, rate in rates.items() if kind != "llm"}
        if "http" in rates:
            cores = len(os.sched_getaffinity(0))
            alone = statistics.median(tokens / (run["seconds"] - run["cpu_s"] / cores) for run in rounds["http"])
            costs["http without the client"] = 1 - alone / rates["llm"]
    return {"output_tok_per_s": rates, "cost": costs}


async def _idle(server: ServerProcess, count: int, seconds: float) -> dict[str, float]:
    """Processor seconds of the server with no connection, and with ``count`` that do nothing."""
    without = await _cpu_over(server, seconds)
    connections = []
    for _ in range(count):
        connection = await Connection.open(server.address)
        connection.writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        if await connection.head() != 200:
            raise SystemExit(f"/health answers {connection.status}")
        await connection.body()
        connections.append(connection)
    before = server.rss_bytes()
    used = await _cpu_over(server, seconds)
    still = sum(not connection.reader.at_eof() for connection in connections)
    for connection in connections:
        connection.writer.close()
    return {
        "connections": count,
        "still_open_at_the_end": still,
        "seconds": seconds,
        "cpu_s_without": without,
        "cpu_s_with": used,
        "rss_bytes_with": before,
    }


async def _cpu_over(server: ServerProcess, seconds: float) -> float:
    await asyncio.sleep(2.0)
    before = cpu_seconds(server.tree())
    await asyncio.sleep(seconds)
    return cpu_seconds(server.tree()) - before


def _profile(server: ServerProcess, party: Party, options: argparse.Namespace) -> None:
    """Have py-spy watch the front end while the streams run; write its stacks and print where the time went."""
    # Only samples with the GIL held: waiting looks busy to py-spy where the wait is inside uvloop.
    words = [options.py_spy, "record", "--pid", str(server.pid), "--gil", "--function", "--nonblocking"]
    words += ["--format", "raw", "--rate", "1000", "--output", str(options.profile)]
    watcher = subprocess.Popen(
        [*words, "--duration", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    time.sleep(1.0)
    for number in range(options.rounds):
        party.run(options.seed * 1000 + 500 + number)
    watcher.send_signal(2)
    _, errors = watcher.communicate()
    if not options.profile.is_file():
        raise SystemExit(f"py-spy wrote nothing: {errors[-1000:]}")
    print(hot_spots(options.profile.read_text()))


def hot_spots(stacks: str, shown: int = 40) -> str:
    """A table of functions by their own time and by that of all they call, in percent of the samples."""
    own: dict[str, int] = {}
    total: dict[str, int] = {}
    samples = 0
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        samples += int(count)
        own[frames[-1]] = own.get(frames[-1], 0) + int(count)
        for frame in set(frames):
            total[frame] = total.get(frame, 0) + int(count)
    lines = [f"{'own':>6} {'total':>6}  function ({samples} samples)"]
    for frame in sorted(own, key=lambda frame: -own[frame])[:shown]:
        lines.append(f"{own[frame] / samples:6.1%} {total[frame] / samples:6.1%}  {frame}")
    lines.append("by total:")
    for frame in sorted(total, key=lambda frame: -total[frame])[:shown]:
        lines.append(f"{own.get(frame, 0) / samples:6.1%} {total[frame] / samples:6.1%}  {frame}")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(_ALL), help="which parties, separated by commas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--idle", type=int, default=1000, help="idle connections; 0: leave that part out")
    parser.add_argument("--idle-seconds", type=float, default=30.0)
    parser.add_argument("--profile", type=Path, help="write py-spy's stacks of the front end here, and measure nothing")
    parser.add_argument("--py-spy", default="py-spy", help="py-spy's program")
    parser.add_argument("--json", type=Path, help="file to write; else one in benchmarks/results")
    parser.add_argument("--party", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    if options.party is not None:
        _be_party(options)
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the server inherits it
    record = {"what": "cost of the front end", **provenance(["uvicorn", "uvloop", "starlette", "msgspec"])}
    with ServerProcess.octavo("--max-model-len", "2048", model=options.model) as server:
        if options.profile is not None:
            with Party("http", options, server.address.url) as party:
                _profile(server, party, options)
            return
        parties = {kind: Party(kind, options, server.address.url) for kind in options.only.split(",")}
        try:
            record |= measure(parties, server, options)
        finally:
            for party in parties.values():
                party.__exit__(None, None, None)
        if options.idle:
            record["idle"] = uvloop.run(_idle(server, options.idle, options.idle_seconds))
    record |= about_model(options.model)
    record |= {name: getattr(options, name) for name in ("streams", "input_len", "output_len")}
    path = options.json or RESULTS / dashed(f"frontend cost {record['date'][:10]}.json")
    write(record, path)
    _report(record)
    print(f"written to {path}")


def _report(record: Mapping[str, Any]) -> None:
    for kind, rate in record["output_tok_per_s"].items():
        cost = record["cost"].get(kind)
        print(f"{_TITLES[kind]:44} {rate:8.0f} tokens/s" + ("" if cost is None else f"  cost {cost:6.1%}"))
    runs = record["rounds"].get("http")
    if runs:
        middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        print(
            f"over HTTP, of {middle['seconds']:.2f} s: front end {middle['server_front_end_cpu_s']:.2f}, engine "
            f"{middle['server_engine_cpu_s']:.2f}, client {middle['cpu_s']:.2f} processor seconds"
        )
        if "http without the client" in record["cost"]:
            print(f"cost without the client {record['cost']['http without the client']:.1%}")
    idle = record.get("idle")
    if idle:
        print(
            f"{idle['still_open_at_the_end']} idle connections over {idle['seconds']:.0f} s: {idle['cpu_s_with']:.2f} "
            f"processor seconds, without them {idle['cpu_s_without']:.2f}"
        )


if __name__ == "__main__":
    main()
