"""One measurement of one server: find out what it serves, warm it, load it, and put the figures together."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import random
import resource
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.benchmarking.answers import Answer
from octavo.benchmarking.arrivals import arrival_times
from octavo.benchmarking.client import Client, Exchange, Target
from octavo.benchmarking.datasets import Work, make_work
from octavo.benchmarking.dialects import Asking, Dialect, dialect_of
from octavo.benchmarking.figures import detailed, summarise
from octavo.benchmarking.load import Counts, Shot, drive
from octavo.benchmarking.options import BenchOptions
from octavo.benchmarking.progress import showing
from octavo.benchmarking.quality import AS_STORED, no_quality, recorded_quality
from octavo.benchmarking.record import model_sha256
from octavo.benchmarking.speculation import counters, speculation
from octavo.benchmarking.workload import WordSource
from octavo.errors import ConfigError, OctavoError

__all__ = ["Run", "Server", "ServerError", "local_root", "look_up", "measure"]

_WARMUP_SEED = 1_000_003  # another work than the measured one, so that no prompt is in a cache
_LOOK_UP_SECONDS = 10.0
_PROBE = Work("Hi", 1, 1)


class ServerError(OctavoError):
    """The server to be measured is not there, or does not do what is needed of it."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server to measure and what it says of itself; ``root`` is where it has the model from, if it tells."""

    name: str
    target: Target
    model: str
    root: str | None = None
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Run:
    """The figures of one run, what became of each request, and everything the figures depend on."""

    result: dict[str, Any]
    answers: list[Answer]


async def look_up(name: str, url: str, options: BenchOptions) -> Server:
    """Ask a server what it serves; with ``options.model`` given, it need not answer that."""
    async with _client(Target.of(url), options) as client:
        about: dict[str, Any] = {"url": client.target.url}
        models = await client.call("GET", "/v1/models", timeout=_LOOK_UP_SECONDS)
        if models.error is not None and models.status == 0:
            raise ServerError(models.error)
        about["software"] = models.headers.get("server")
        cards = _cards(models)
        name_asked = options.served_model_name or options.model
        wanted = [card for card in cards if name_asked in (None, card.get("id"))]
        card = wanted[0] if wanted else {}
        if not cards and options.backend == "tgi":
            info = (await client.call("GET", "/info", timeout=_LOOK_UP_SECONDS)).json()
            if isinstance(info, dict):
                card = {"id": info.get("model_id"), "max_model_len": info.get("max_total_tokens")}
                about["version"] = info.get("version")
        version = (await client.call("GET", "/version", timeout=_LOOK_UP_SECONDS)).json()
        if isinstance(version, dict) and "version" in version:
            about["version"] = version["version"]
        about |= {key: card[key] for key in ("max_model_len", "owned_by") if card.get(key) is not None}
        model = name_asked or card.get("id")
        if model is None:
            raise ServerError(
                f"{client.target.url}/v1/models names no model ({models.fault() or 'none'}): give --model"
            )
    return Server(name, client.target, str(model), card.get("root"), {k: v for k, v in about.items() if v is not None})


def _cards(models: Exchange) -> list[dict[str, Any]]:
    listing = models.json() if models.ok else None
    cards = listing.get("data") if isinstance(listing, dict) else None
    return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []


def _client(target: Target, options: BenchOptions) -> Client:
    lines = [f"{name}: {value}" for name, value in options.headers.items()]
    return Client(target, headers=lines, keep_alive=options.keep_alive, insecure=options.insecure)


async def measure(
    server: Server,
    options: BenchOptions,
    words: WordSource,
    *,
    tokenizer_id: str,
    work: Sequence[Work] | None = None,
    progress: bool = True,
) -> Run:
    """Run the load of ``options`` once; ``work`` replaces what the data set would give."""
    options = options.with_lengths()
    work = work if work is not None else make_work(options, words, seed=options.seed)
    session = _Session(server, options, words)
    async with _client(server.target, options) as client:
        await session.wait_until_ready(client, work[0])
        await session.warm_up(client)
        before = await session.counters(client)
        answers, seconds, cpu, probes = await session.load(client, work, progress)
        after = await session.counters(client)
    per_token = options.definitions == "octavo"
    result = _settings(server, options, tokenizer_id, len(work)) | summarise(
        answers,
        seconds,
        percentiles=options.percentiles,
        metrics=options.metrics,
        limits=options.limits,
        per_token=per_token,
        num_devices=options.num_devices,
    )
    result |= {
        "client_cpu_s": cpu,
        "client_cpu_share": cpu / seconds,
        "client_cpu_us_per_token": 1e6 * cpu / max(1, result["total_output_tokens"]),
    }
    result |= _probe_figures(probes) if options.probe_request_rate else {}
    drafted = speculation(before, after)
    if drafted is not None:
        result["speculation"] = drafted
    if options.ramp_up_strategy is not None:
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        result |= {name: getattr(options, name) for name in names}
    if options.save_detailed:
        result |= detailed(answers, per_token=per_token)
    errors = sorted({answer.error for answer in answers if answer.error is not None})
    if errors:
        result["distinct_errors"] = errors[:10]
    return Run(result, answers)


def _settings(server: Server, options: BenchOptions, tokenizer_id: str, count: int) -> dict[str, Any]:
    rate: float | str = options.request_rate
    root = local_root(server)
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "endpoint_type": options.backend,
        "label": options.label,
        "model_id": server.model,
        "model_sha256": None if root is None else _hash(root),
        "form": None,
        "quality": _quality(root, options.notes.get("form")),
        "tokenizer_id": tokenizer_id,
        "num_prompts": count,
        "request_rate": "inf" if math.isinf(options.request_rate) else rate,
        "burstiness": options.burstiness if not math.isinf(options.burstiness) else "inf",
        "max_concurrency": options.max_concurrency,
        "dataset_name": options.dataset_name,
        "seed": options.seed,
        "definitions": options.definitions,
        "server": server.about,
        **options.notes,
    }


class _Session:
    """What the phases of a measurement share."""

    def __init__(self, server: Server, options: BenchOptions, words: WordSource) -> None:
        self.server = server
        self.options = options
        self.words = words
        self.dialect: Dialect = dialect_of(options.backend)
        self.path = options.endpoint or self.dialect.endpoint
        self.prefix = options.request_id_prefix or f"bench-{secrets.token_hex(4)}-"
        self.asking = Asking(
            ignore_eos=options.ignore_eos,
            logprobs=options.logprobs,
            sampling=options.sampling,
            extra_body=_object(options.extra_body),
            continuous_usage=options.continuous_usage,
        )

    def shots(self, work: Sequence[Work], due: Sequence[float]) -> list[Shot]:
        """The requests made up, so that nothing is left to do when they are sent."""
        names = self._model_names(len(work))
        return [
            Shot(self.dialect.body(one, names[number], self.asking), due[number], one.after, f"{self.prefix}{number}")
            for number, one in enumerate(work)
        ]

    def _model_names(self, count: int) -> list[str]:
        adapters = self.options.lora_modules
        if not adapters:
            return [self.server.model] * count
        if self.options.lora_assignment == "round-robin":
            return [adapters[number % len(adapters)] for number in range(count)]
        return random.Random(f"adapters {self.options.seed}").choices(adapters, k=count)

    def read(self, exchange: Exchange, one: Work, queued: float = 0.0) -> Answer:
        """What became of a request, its tokens counted."""
        answer = self.dialect.read(exchange, role_counts=self.options.definitions == "vllm")
        answer.input_tokens = one.input_tokens
        answer.queued = queued
        answer.settle(self.words)
        return answer

    async def ask(self, client: Client, one: Work) -> Answer:
        """Send one request apart from the load."""
        body = self.dialect.body(one, self._model_names(1)[0], self.asking)
        return self.read(await client.call("POST", self.path, body, timeout=self.options.request_timeout), one)

    async def wait_until_ready(self, client: Client, one: Work) -> None:
        """Ask again and again until there is an answer, for as long as the options allow."""
        if not self.options.ready_check_timeout_sec:
            return
        end = time.monotonic() + self.options.ready_check_timeout_sec
        while True:
            answer = await self.ask(client, replace(one, at=None, after=None))
            if answer.ok:
                return
            if time.monotonic() >= end:
                raise ServerError(f"{self.server.target.url} is not ready: {answer.error}")
            await asyncio.sleep(min(1.0, max(0.0, end - time.monotonic())))

    async def warm_up(self, client: Client) -> None:
        """Requests that are not counted."""
        count = self.options.num_warmups
        if not count:
            return
        steps = replace(self.options, num_prompts=max(count, self.options.prefix_repetition_num_prefixes))
        work = make_work(steps, self.words, seed=self.options.seed + _WARMUP_SEED)
        work = [replace(one, after=None) for one in (work * count)[:count]]
        failed: list[str] = []

        def take(number: int, exchange: Exchange, _: float) -> None:
            answer = self.read(exchange, work[number])
            if answer.error is not None:
                failed.append(answer.error)

        await drive(
            client,
            self.path,
            self.shots(work, [0.0] * count),
            take=take,
            max_concurrency=self.options.max_concurrency,
            timeout=self.options.request_timeout,
        )
        if len(failed) == count:
            raise ServerError(f"every warm-up request failed at {self.server.target.url}: {failed[0]}")

    async def counters(self, client: Client) -> dict[str, float]:
        """The server's own counters of speculative decoding; none where it has no such page."""
        page = await client.call("GET", "/metrics", timeout=_LOOK_UP_SECONDS)
        return counters(page.body.decode(errors="replace")) if page.ok else {}

    async def load(
        self, client: Client, work: Sequence[Work], progress: bool
    ) -> tuple[list[Answer], float, float, list[Answer]]:
        """The measured part: answers, seconds, processor seconds of this process, and the probes' answers."""
        shots = self.shots(work, arrival_times(self.options, work))
        answers: list[Answer | None] = [None] * len(work)
        counts = Counts()
        client.on_event = counts.count_events
        cpu_end = 0.0

        def take(number: int, exchange: Exchange, queued: float) -> None:
            nonlocal cpu_end
            cpu_end = cpu_end or _cpu_seconds()  # what is spent on reading answers afterwards disturbs nobody
            answers[number] = self.read(exchange, work[number], queued)

        probing = asyncio.create_task(self._probe(client)) if self.options.probe_request_rate else None
        cpu_start = _cpu_seconds()
        async with showing(counts, self.server.name, wanted=progress):
            seconds = await drive(
                client,
                self.path,
                shots,
                take=take,
                max_concurrency=self.options.max_concurrency,
                timeout=self.options.request_timeout,
                counts=counts,
            )
        probes: list[Answer] = []
        if probing is not None:
            probing.cancel()
            (ended,) = await asyncio.gather(probing, return_exceptions=True)
            probes = ended if isinstance(ended, list) else []
        return [one for one in answers if one is not None], seconds, (cpu_end or _cpu_seconds()) - cpu_start, probes

    async def _probe(self, client: Client) -> list[Answer]:
        """One-token requests at a steady pace until cancelled; their answers."""
        body = self.dialect.body(_PROBE, self.server.model, self.asking)
        found: list[Exchange] = []
        try:
            while True:
                found.append(await client.call("POST", self.path, body, timeout=self.options.request_timeout))
                await asyncio.sleep(1.0 / self.options.probe_request_rate)
        except asyncio.CancelledError:
            return [self.read(exchange, _PROBE) for exchange in found]


def _probe_figures(probes: Sequence[Answer]) -> dict[str, Any]:
    good = [answer for answer in probes if answer.ok]
    figures = summarise(good, 1.0, metrics=("e2el",)) if good else {}
    return {
        "probe_completed": len(good),
        "probe_failed": len(probes) - len(good),
        "probe_median_e2el_ms": figures.get("median_e2el_ms", 0.0),
        "probe_p99_e2el_ms": figures.get("p99_e2el_ms", 0.0),
        "probe_max_e2el_ms": 1000 * max((answer.latency for answer in good), default=0.0),
    }


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"extra_body must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"extra_body must be a JSON object, got {text!r}")
    return value


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def local_root(server: Server) -> str | None:
    """Where the served model is on this machine, if it is."""
    return server.root if server.root is not None and Path(server.root).exists() else None


def _quality(root: str | None, form: str | None) -> dict[str, Any]:
    """The recorded divergence of the served model, where the model is here and --metadata tells its weight form."""
    if root is None:
        return no_quality("the server does not tell where its model is on this machine")
    if form is None:
        return no_quality("servers do not tell their weight form; --metadata form=w8 does")
    return recorded_quality(_hash(root), None if form == AS_STORED else form)


@functools.cache
def _hash(root: str) -> str:
    return model_sha256(Path(root))
