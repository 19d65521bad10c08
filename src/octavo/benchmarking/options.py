"""The options of a measurement over HTTP: those of ``vllm bench serve`` under their names, and octavo's own.

The command line is made of these fields: a flag for each, with the field's ``help``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from octavo.errors import ConfigError

__all__ = ["METRICS", "BenchOptions"]

METRICS = ("ttft", "tpot", "itl", "e2el")
_RAMPS = ("linear", "exponential")


def _option(default: Any, help: str, **more: Any) -> Any:
    """A field; mutable defaults are not needed, as lists are tuples."""
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class BenchOptions:
    """Everything a measurement over HTTP depends on but the servers' URLs."""

    # Which server, and how to speak to it.
    backend: str = _option("openai", "protocol: openai (= vllm; completions), openai-chat or tgi")
    endpoint: str | None = _option(None, "path of the route; default: the protocol's")
    model: str | None = _option(None, "model name to ask for; default: the first of the server's /v1/models")
    served_model_name: str | None = _option(
        None, "name to ask for where --model says which model it is; default: the same"
    )
    tokenizer: str | None = _option(
        None, "model whose tokenizer makes and counts texts; default: the served one's if it is here, else octavo's"
    )
    header: tuple[str, ...] = _option((), "further header KEY=VALUE; may be given several times")
    api_key: str | None = _option(None, "sent as a bearer token; default: none", envvar="OPENAI_API_KEY")
    extra_body: str | None = _option(None, "JSON object whose fields are added to each request; default: none")
    request_id_prefix: str | None = _option(None, "what the X-Request-Id headers begin with; default: made up")
    insecure: bool = _option(False, "do not check certificates")
    keep_alive: bool = _option(True, "use connections again; else one for each request")
    request_timeout: float = _option(21_600.0, "seconds after which a request has failed", above=0.0)
    ready_check_timeout_sec: int = _option(0, "wait up to so many seconds for one real answer; 0: no check", least=0)
    continuous_usage: bool = _option(False, "ask for token counts in every event, where the server can (vLLM, octavo)")
    lora_modules: tuple[str, ...] = _option((), "adapters to ask for in place of the model; several times")
    lora_assignment: str = _option("random", "which adapter a request gets", choices=("random", "round-robin"))

    # How much, how fast.
    num_prompts: int = _option(1000, "requests", least=1)
    request_rate: float = _option(math.inf, "requests a second; inf: all at once", above=0.0)
    burstiness: float = _option(
        1.0, "shape of the gamma distribution of gaps: 1 Poisson, below burstier, above more even", above=0.0
    )
    max_concurrency: int | None = _option(None, "most requests in flight; default: no limit", least=1)
    ramp_up_strategy: str | None = _option(
        None, "let the rate grow from start to end; default: it stays", choices=_RAMPS
    )
    ramp_up_start_rps: float | None = _option(None, "rate of the first request; default: no ramp", above=0.0)
    ramp_up_end_rps: float | None = _option(None, "rate of the last request; default: no ramp", above=0.0)
    num_warmups: int = _option(0, "requests before the measurement", least=0)
    probe_request_rate: float = _option(0.0, "one-token requests a second beside the load, reported apart", least=0.0)
    self_timed: bool = _option(False, "send requests when the trace says")
    seed: int = _option(0, "of the work and of arrivals", least=0)

    # What is sent.
    dataset_name: str = _option(
        "random", "random, sharegpt, prefix_repetition, custom (JSONL), timed_trace (JSONL) or agents"
    )
    dataset_path: str | None = _option(None, "the data set's file; default: none, as not every data set has one")
    disable_shuffle: bool = _option(False, "keep the order of the data set")
    no_oversample: bool = _option(False, "send fewer requests rather than some twice when the file has too few")
    input_len: int | None = _option(
        None, "prompt tokens, for any data set that makes its prompts; default: the data set's", least=1
    )
    output_len: int | None = _option(None, "answer tokens, for any data set; default: the data set's", least=1)
    random_input_len: int = _option(1024, "random: prompt tokens", least=1)
    random_output_len: int = _option(128, "random: answer tokens", least=1)
    random_range_ratio: float = _option(0.0, "random: lengths vary by this share both ways", least=0.0, below=1.0)
    random_prefix_len: int = _option(0, "random: tokens that all prompts begin with, beside their own", least=0)
    sharegpt_output_len: int | None = _option(None, "sharegpt: answer tokens; default: as in the data", least=1)
    custom_output_len: int = _option(256, 'custom: answer tokens; -1: each line\'s "output_tokens"', least=-1)
    prefix_repetition_prefix_len: int = _option(256, "prefix_repetition: tokens of a prefix", least=1)
    prefix_repetition_suffix_len: int = _option(256, "prefix_repetition: tokens of a suffix", least=1)
    prefix_repetition_num_prefixes: int = _option(10, "prefix_repetition: different prefixes", least=1)
    prefix_repetition_output_len: int = _option(128, "prefix_repetition: answer tokens", least=1)
    timed_trace_chunk_hash_size: int = _option(16, "timed_trace: tokens a hash id stands for", least=1)
    timed_trace_sec_multiplier: float = _option(1.0, "timed_trace: seconds a unit of its timestamps is", above=0.0)
    agent_steps: int = _option(5, "agents: calls one after the other that each agent makes", least=1)

    # How tokens are chosen.
    ignore_eos: bool = _option(False, "go on to the full length whatever the model says")
    logprobs: int | None = _option(None, "likeliest tokens to report with each token; default: none", least=0)
    temperature: float | None = _option(0.0, "0: the likeliest token, so that all servers do the same", least=0.0)
    top_p: float | None = _option(None, "as in a request; default: the server's")
    top_k: int | None = _option(None, "as in a request; default: the server's")
    min_p: float | None = _option(None, "as in a request; default: the server's")
    frequency_penalty: float | None = _option(None, "as in a request; default: the server's")
    presence_penalty: float | None = _option(None, "as in a request; default: the server's")
    repetition_penalty: float | None = _option(None, "as in a request; default: the server's")

    # What is reported.
    percentile_metrics: str = _option("ttft,tpot,itl", "which of ttft, tpot, itl, e2el to report")
    metric_percentiles: str = _option("99", "which percentiles of them")
    goodput: tuple[str, ...] = _option((), "limits a good request keeps, in ms: ttft:200 tpot:50 e2el:2000")
    definitions: str = _option(
        "octavo",
        "octavo: ITL per token, a chat event with only the role is no token; vllm: per event, and it is",
        choices=("octavo", "vllm"),
    )
    num_devices: int = _option(1, "devices the output is divided by in the line per device", least=1)

    # Where it is kept.
    label: str | None = _option(None, "name of the run in file names; default: the backend")
    save_result: bool = _option(False, "write the figures as JSON")
    save_detailed: bool = _option(False, "write each request's times, lengths, text and error too")
    append_result: bool = _option(False, "add to the file instead of replacing it, a line each run")
    result_dir: str | None = _option(None, "folder of the file; default: here")
    result_filename: str | None = _option(None, "its name; default: made of label, rate, model and date")
    metadata: tuple[str, ...] = _option((), "further KEY=VALUE to put into the result")

    def __post_init__(self) -> None:
        for item in fields(self):
            _check(item.name, getattr(self, item.name), item.metadata)
        ramp = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is not None:
            if None in ramp:
                raise ConfigError("ramp_up_strategy needs ramp_up_start_rps and ramp_up_end_rps")
            if not math.isinf(self.request_rate):
                raise ConfigError("request_rate and ramp_up_strategy exclude each other")
        elif ramp != (None, None):
            raise ConfigError("ramp_up_start_rps and ramp_up_end_rps need ramp_up_strategy")
        if self.self_timed and self.dataset_name != "timed_trace":
            raise ConfigError("self_timed needs dataset_name timed_trace: only a trace says when requests arrive")
        unknown = sorted(set(self.metrics) - set(METRICS))
        if unknown:
            raise ConfigError(f"percentile_metrics must be of {', '.join(METRICS)}, got {unknown[0]!r}")
        if any(mark in (self.request_id_prefix or "") for mark in "\r\n"):
            raise ConfigError("request_id_prefix must be one line")
        if self.custom_output_len == 0:
            raise ConfigError("custom_output_len must be -1 or at least 1, got 0")
        self.percentiles, self.limits, self.headers, self.notes  # noqa: B018 - read once, so that mistakes show early

    def with_lengths(self) -> BenchOptions:
        """The same with ``input_len`` and ``output_len`` put where the data set looks for lengths."""
        given: dict[str, int] = {}
        if self.input_len is not None:
            given |= {"random_input_len": self.input_len, "prefix_repetition_suffix_len": self.input_len}
        if self.output_len is not None:
            names = ("random_output_len", "sharegpt_output_len", "custom_output_len", "prefix_repetition_output_len")
            given |= dict.fromkeys(names, self.output_len)
        return replace(self, **given)  # type: ignore[arg-type]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics to report, in the order asked for."""
        return tuple(self.percentile_metrics.replace(",", " ").split())

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles to report."""
        try:
            found = tuple(float(word) for word in self.metric_percentiles.replace(",", " ").split())
        except ValueError as error:
            raise ConfigError(f"metric_percentiles must be numbers, got {self.metric_percentiles!r}") from error
        if not all(0 <= value <= 100 for value in found):
            raise ConfigError(f"metric_percentiles must be from 0 to 100, got {self.metric_percentiles!r}")
        return found

    @property
    def limits(self) -> dict[str, float]:
        """The limits of a good request: milliseconds by metric."""
        found: dict[str, float] = {}
        for word in " ".join(self.goodput).replace(",", " ").split():
            name, _, value = word.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = -1.0
            if name not in ("ttft", "tpot", "e2el") or not limit >= 0:
                raise ConfigError(f"goodput must be ttft:MS, tpot:MS or e2el:MS with MS from 0 up, got {word!r}")
            found[name] = limit
        return found

    @property
    def headers(self) -> dict[str, str]:
        """Further headers, the key's among them."""
        found = _pairs("header", self.header)
        if self.api_key:
            found.setdefault("Authorization", f"Bearer {self.api_key}")
        return found

    @property
    def notes(self) -> dict[str, str]:
        """What ``metadata`` adds to the result."""
        return _pairs("metadata", self.metadata)

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of a request that choose tokens; None: left out."""
        names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
        return {name: getattr(self, name) for name in (*names, "repetition_penalty")}


def _check(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if value is None:
        return
    if "choices" in limits and value not in limits["choices"]:
        raise ConfigError(f"{name} must be one of {', '.join(limits['choices'])}, got {value!r}")
    if "least" in limits and not value >= limits["least"]:
        raise ConfigError(f"{name} must be at least {limits['least']}, got {value}")
    if "above" in limits and not value > limits["above"]:
        raise ConfigError(f"{name} must be above {limits['above']:g}, got {value}")
    if "below" in limits and not value < limits["below"]:
        raise ConfigError(f"{name} must be below {limits['below']:g}, got {value}")


def _pairs(name: str, words: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip() or any(mark in word for mark in "\r\n"):
            raise ConfigError(f"{name} must be KEY=VALUE, got {word!r}")
        found[key.strip()] = value
    return found
