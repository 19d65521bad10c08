"""Plays what happens in a front end to an observer, with real request states and a real output processor."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from prometheus_client.parser import text_string_to_metric_families

from octavo.backends.interface import SampledToken
from octavo.engine.messages import EngineInfo, StepStats
from octavo.engine.request import FinishReason, SequenceOutput
from octavo.frontend.loading import load_tokenizer
from octavo.frontend.options import EngineOptions
from octavo.frontend.output_processor import OutputProcessor, RequestState
from octavo.frontend.tokenizer import Tokenizer
from octavo.observability.endpoint import metrics_text
from octavo.observability.metrics import Metrics
from octavo.sampling.params import SamplingParams
from octavo.weights.hub import resolve_model


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2-135m"))


def engine_info(pid: int = 4242) -> EngineInfo:
    return EngineInfo(pid, 49152, 2048, 100, 16, "", {}, {})


@dataclass
class Scene:
    """The states of an engine and its requests; `step` plays one frame."""

    metrics: Metrics = field(default_factory=lambda: Metrics("the-model", version="1.2.3", options=EngineOptions()))
    stats: StepStats = field(default_factory=lambda: StepStats(num_blocks=100))
    count: int = 0

    def __post_init__(self) -> None:
        self.outputs = OutputProcessor(tokenizer())
        self.metrics.engine_started(engine_info())

    def accept(self, prompt_tokens: int = 10, cached: int = 0, **params: object) -> RequestState:
        self.count += 1
        state = RequestState(
            f"r{self.count}",
            None,
            list(range(100, 100 + prompt_tokens)),
            SamplingParams(**{"max_tokens": 50, **params}),  # type: ignore[arg-type]
            tokenizer(),
            seed=1,
            arrival=time.monotonic(),
        )
        state.num_cached_tokens = cached
        self.metrics.accepted(state)
        self.outputs.add(state)
        return state

    def step(self, states: Iterable[RequestState] = (), end: FinishReason | None = None, **stats: object) -> None:
        """One token for each sequence of these requests, the last one when ``end`` is given."""
        produced = []
        for state in states:
            if state.metrics.scheduled_time is None:
                state.metrics.scheduled_time = time.monotonic()
            for sequence in state.sequences:
                token = SampledToken(token=500, logprob=-1.0, rank=1, top=())
                error = "its logits are not finite" if end == "error" else None
                produced.append(
                    SequenceOutput(
                        state.request_id,
                        sequence.index,
                        [token],
                        finished=end is not None,
                        finish_reason=end,
                        error=error,
                        num_cached_tokens=state.num_cached_tokens,
                    )
                )
        values = {name: getattr(self.stats, name) for name in StepStats.__struct_fields__}
        values |= {
            "steps": self.stats.steps + 1,
            "generated_tokens": self.stats.generated_tokens + len(produced),
            "running": len(produced) if end is None else 0,
            "decode_tokens": len(produced),
            "prefill_tokens": 0,
            "schedule_seconds": 0.0001,
            "execute_seconds": 0.01,
            "process_seconds": 0.0002,
            **stats,
        }
        self.stats = StepStats(**values)  # type: ignore[arg-type]
        processed = self.outputs.process(produced)
        self.metrics.stepped(self.stats, processed)
        for state in processed.finished:
            self.metrics.finished(state)

    def abort(self, state: RequestState) -> None:
        self.outputs.remove(state.request_id)
        state.end("abort")
        self.metrics.finished(state)

    def lose_engine(self, replayed: int, failed: Iterable[RequestState] = ()) -> None:
        failed = list(failed)
        for state in failed:
            self.outputs.remove(state.request_id)
            state.end("error")
            self.metrics.finished(state)
        self.metrics.engine_lost("killed", replayed, len(failed))
        self.stats = StepStats(num_blocks=100)

    def read(self) -> Reading:
        return Reading(metrics_text(self.metrics).decode())


class Reading:
    """The series of one scrape by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.kinds: dict[str, str] = {}
        self.series: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            self.kinds[family.name] = family.type
            for sample in family.samples:
                name = sample.name
                if name.startswith("tgi_"):  # the parser adds _total to counters that do not have it
                    name = name.removesuffix("_total")
                key = (name, frozenset(sample.labels.items()))
                assert key not in self.series, f"{key} is there twice"
                self.series[key] = sample.value

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.series}

    def __call__(self, name: str, **labels: str) -> float:
        """The value of the one series of that name that has these labels."""
        found = self.all(name, **labels)
        assert len(found) == 1, f"{name}{labels}: {found}"
        return found[0][1]

    def all(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        wanted = labels.items()
        return [
            (dict(pairs), value)
            for (found, pairs), value in self.series.items()
            if found == name and wanted <= set(pairs)
        ]

    def by(self, name: str, label: str) -> dict[str, float]:
        return {labels[label]: value for labels, value in self.all(name)}
