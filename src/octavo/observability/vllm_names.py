"""The numbers under vLLM's names, labels and buckets, so that boards and alerts made for vLLM work unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from octavo.observability.buckets import COUNTS, E2E, INTER_TOKEN, ITERATION_TOKENS, LENGTHS, TTFT
from octavo.observability.exposition import Family, histogram, scalar
from octavo.observability.instruments import Histogram
from octavo.observability.numbers import REASONS, Numbers, RequestTimes, Snapshot

if TYPE_CHECKING:
    from octavo.engine.messages import EngineInfo
    from octavo.frontend.options import EngineOptions

__all__ = ["vllm_families"]

_Read = Callable[[Snapshot], float]


def vllm_families(
    numbers: Numbers, model_name: str, engine: EngineInfo | None, options: EngineOptions | None
) -> list[Family]:
    """Every name of vLLM's that means something here. The longest length bucket depends on the engine's limits."""
    base = {"model_name": model_name, "engine": "0"}
    longest = engine.max_model_len if engine is not None else 8192
    lengths = [bound for bound in LENGTHS if bound <= longest]

    def one(name: str, kind: Literal["counter", "gauge"], text: str, read: _Read) -> Family:
        return scalar(f"vllm:{name}", kind, text, (base, read))

    def several(name: str, kind: Literal["counter", "gauge"], text: str, label: str, reads: dict[str, _Read]) -> Family:
        return scalar(f"vllm:{name}", kind, text, *[({**base, label: value}, read) for value, read in reads.items()])

    def times(name: str, text: str, bounds: list[float], *shown: Histogram) -> Family:
        return histogram(f"vllm:{name}", text, bounds, (base, shown))

    def requests(name: str, text: str, bounds: list[float], pick: Callable[[RequestTimes], Histogram]) -> Family:
        return times(name, text, bounds, pick(numbers.done), pick(numbers.given_up))

    families = [
        one("num_requests_running", "gauge", "Sequences in the running batch.", lambda s: s.running),
        one("num_requests_waiting", "gauge", "Sequences waiting to be processed.", lambda s: s.waiting),
        several(
            "num_requests_waiting_by_reason",
            "gauge",
            "Sequences waiting, by reason.",
            "reason",
            {"capacity": lambda s: s.waiting, "deferred": lambda s: 0},
        ),
        one("kv_cache_usage_perc", "gauge", "Share of the KV cache in use; 1 is all of it.", lambda s: s.usage),
        several(
            "engine_sleep_state",
            "gauge",
            "Whether the engine is awake; it does not sleep.",
            "sleep_state",
            {"awake": lambda s: 1, "weights_offloaded": lambda s: 0, "discard_all": lambda s: 0},
        ),
        one(
            "prefix_cache_queries_total",
            "counter",
            "Tokens looked up in the prefix cache.",
            lambda s: s.totals.prefix_queries,
        ),
        one("prefix_cache_hits_total", "counter", "Tokens found in the prefix cache.", lambda s: s.totals.prefix_hits),
        one(
            "num_preemptions_total",
            "counter",
            "Times a sequence was put back to make room.",
            lambda s: s.totals.preemptions,
        ),
        one(
            "prompt_tokens_total",
            "counter",
            "Prompt tokens of the requests that got a first token.",
            lambda s: numbers.prompt_tokens,
        ),
        several(
            "prompt_tokens_by_source_total",
            "counter",
            "Prompt tokens by where their keys and values came from.",
            "source",
            {
                "local_compute": lambda s: numbers.prompt_tokens - numbers.cached_prompt_tokens,
                "local_cache_hit": lambda s: numbers.cached_prompt_tokens,
                "external_kv_transfer": lambda s: 0,
            },
        ),
        one(
            "prompt_tokens_cached_total",
            "counter",
            "Prompt tokens taken from the prefix cache.",
            lambda s: numbers.cached_prompt_tokens,
        ),
        one("generation_tokens_total", "counter", "Tokens generated.", lambda s: numbers.generated_tokens),
        several(
            "request_success_total",
            "counter",
            "Requests that ended, by reason; together they are the requests accepted and no longer running.",
            "finished_reason",
            {reason: _finished(numbers, reason) for reason in REASONS},
        ),
        requests("request_prompt_tokens", "Prompt tokens of a request.", lengths, lambda r: r.prompt_tokens),
        requests("request_generation_tokens", "Tokens a request got.", lengths, lambda r: r.generated_tokens),
        requests(
            "request_max_num_generation_tokens",
            "Tokens in the longest answer of a request.",
            lengths,
            lambda r: r.longest_sequence,
        ),
        times("request_params_max_tokens", "The max_tokens of a request.", lengths, numbers.max_tokens),
        requests(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were not in the prefix cache.",
            lengths,
            lambda r: r.computed_prompt_tokens,
        ),
        times("request_params_n", "The n of a request.", COUNTS, numbers.answers),
        times("iteration_tokens_total", "Tokens computed in a step.", ITERATION_TOKENS, numbers.iteration_tokens),
        times("time_to_first_token_seconds", "From arrival to the first token.", TTFT, numbers.first_token),
        times(
            "inter_token_latency_seconds",
            "Between two tokens of a sequence.",
            INTER_TOKEN,
            numbers.inter_token,
        ),
        requests(
            "request_time_per_output_token_seconds",
            "Mean time of a token after the first, of a request.",
            INTER_TOKEN,
            lambda r: r.per_token,
        ),
        requests("e2e_request_latency_seconds", "From arrival to the end.", E2E, lambda r: r.total),
        requests("request_queue_time_seconds", "From arrival to the first step.", E2E, lambda r: r.queue),
        requests(
            "request_inference_time_seconds", "From the first step to the last token.", E2E, lambda r: r.inference
        ),
        requests("request_prefill_time_seconds", "From the first step to the first token.", E2E, lambda r: r.prefill),
        requests("request_decode_time_seconds", "From the first token to the last.", E2E, lambda r: r.decode),
    ]
    # What two of these were called until vLLM 0.10: boards made then still ask for them.
    families += [
        one("gpu_cache_usage_perc", "gauge", "Older name of vllm:kv_cache_usage_perc.", lambda s: s.usage),
        times(
            "time_per_output_token_seconds",
            "Older name of vllm:inter_token_latency_seconds.",
            INTER_TOKEN,
            numbers.inter_token,
        ),
    ]
    if engine is not None:
        text = "The settings of the KV cache as labels."
        families.append(scalar("vllm:cache_config_info", "gauge", text, (_cache_config(engine, options), lambda s: 1)))
    return families


def _finished(numbers: Numbers, reason: str) -> _Read:
    return lambda s: numbers.finished[reason]


def _cache_config(engine: EngineInfo, options: EngineOptions | None) -> dict[str, str]:
    known: dict[str, Any] = {
        "block_size": engine.block_size,
        "num_gpu_blocks": engine.num_blocks,
        "num_cpu_blocks": None,
        "sliding_window": None,
        "prefix_caching_hash_algo": "sha256",
        "engine": 0,
    }
    if options is not None:
        known |= {
            "cache_dtype": options.kv_cache_dtype,
            "enable_prefix_caching": options.enable_prefix_caching,
            "gpu_memory_utilization": options.memory_utilization,
            "kv_cache_memory_bytes": options.kv_cache_bytes,
            "num_gpu_blocks_override": options.num_gpu_blocks_override,
        }
    return {name: str(value) for name, value in known.items()}
