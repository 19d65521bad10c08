"""The same numbers under Text Generation Inference's names, which have no labels for the model and no ``_total``.

Where TGI's router and octavo's engine differ in what there is to count:

- A step is "prefill" when any prompt token is in it, otherwise "decode".
- TGI merges batches (concat) and drops ended rows from them (filter); here the scheduler composes each step anew, so
  both show its time: concat of the steps that take in prompt tokens, filter of each sort of step.
- A batch is "concatenated" for reason chunking when prompt tokens and running sequences share a step; the other two
  reasons do not occur.
- Durations of requests are of those that ended well, as in TGI; aborts count as dropped.
- Nothing is speculated, so no token is skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.observability.buckets import LENGTHS, TGI_BATCH, TGI_DURATION
from octavo.observability.exposition import Family, histogram, scalar
from octavo.observability.instruments import Histogram
from octavo.observability.numbers import Numbers, Snapshot

if TYPE_CHECKING:
    from octavo.engine.messages import EngineInfo

__all__ = ["tgi_families"]


def tgi_families(numbers: Numbers, engine: EngineInfo | None) -> list[Family]:
    """Every name TGI's board and documentation know."""
    longest = engine.max_model_len if engine is not None else 8192
    lengths = [bound for bound in LENGTHS if bound <= longest]
    done, prefill, decode = numbers.done, numbers.prefill_steps, numbers.decode_steps

    def duration(name: str, text: str, shown: Histogram) -> Family:
        return histogram(name, text, TGI_DURATION, ({}, [shown]))

    def by_method(name: str, text: str, of_prefill: Histogram, of_decode: Histogram) -> Family:
        series = [({"method": "prefill"}, [of_prefill]), ({"method": "decode"}, [of_decode])]
        return histogram(name, text, TGI_DURATION, *series)

    def steps(name: str, text: str) -> Family:
        return scalar(
            name,
            "counter",
            text,
            ({"method": "prefill"}, lambda s: prefill.whole.count),
            ({"method": "decode"}, lambda s: decode.whole.count),
        )

    both = [numbers.done, numbers.given_up]
    return [
        scalar("tgi_request_count", "counter", "Total number of requests", ({}, _requests)),
        scalar("tgi_request_success", "counter", "Number of successful requests", ({}, _successes)),
        scalar(
            "tgi_request_failure",
            "counter",
            "Number of failed requests by error",
            ({"err": "validation"}, lambda s: _invalid(s) + s.numbers.refused_by_engine),
            ({"err": "template"}, lambda s: s.numbers.refused["template"]),
            ({"err": "overloaded"}, _overloaded),
            ({"err": "dropped"}, lambda s: s.numbers.finished["abort"]),
            ({"err": "incomplete"}, lambda s: s.numbers.broken_off),
            ({"err": "generation"}, lambda s: s.numbers.failed_alone),
        ),
        duration("tgi_request_duration", "Total time spent processing the request", done.total),
        duration("tgi_request_validation_duration", "Time spent validating the request", numbers.preparation),
        duration("tgi_request_queue_duration", "Time spent in the queue per request", done.queue),
        duration("tgi_request_inference_duration", "Request inference duration", done.inference),
        duration("tgi_request_mean_time_per_token_duration", "Mean time per token per request", done.per_token),
        histogram(
            "tgi_request_input_length",
            "Input token length per request",
            lengths,
            ({}, [times.prompt_tokens for times in both]),
        ),
        histogram(
            "tgi_request_generated_tokens", "Generated tokens per request", lengths, ({}, [done.generated_tokens])
        ),
        histogram("tgi_request_max_new_tokens", "Maximum new tokens per request", lengths, ({}, [numbers.max_tokens])),
        histogram(
            "tgi_request_skipped_tokens", "Speculated tokens per request", TGI_BATCH, ({}, [numbers.skipped_tokens])
        ),
        scalar("tgi_queue_size", "gauge", "Current queue size", ({}, lambda s: s.waiting)),
        scalar("tgi_batch_current_size", "gauge", "Current batch size", ({}, lambda s: s.running)),
        scalar(
            "tgi_batch_current_max_tokens",
            "gauge",
            "Token places held by the current batch",
            ({}, lambda s: s.stats.allocated_slots),
        ),
        scalar(
            "tgi_batch_total_tokens",
            "gauge",
            "Maximum amount of tokens in total.",
            ({}, lambda s: s.engine.num_blocks * s.engine.block_size if s.engine is not None else 0),
        ),
        histogram("tgi_batch_next_size", "Batch size of the next batch", TGI_BATCH, ({}, [numbers.batch_size])),
        steps("tgi_batch_inference_count", "Inference calls per method (prefill or decode)"),
        steps("tgi_batch_inference_success", "Number of successful inference calls per method (prefill or decode)"),
        by_method("tgi_batch_inference_duration", "Batch inference duration", prefill.whole, decode.whole),
        by_method(
            "tgi_batch_forward_duration",
            "Batch forward duration per method (prefill or decode)",
            prefill.execute,
            decode.execute,
        ),
        by_method(
            "tgi_batch_decode_duration",
            "Time spent decoding a batch per method (prefill or decode)",
            prefill.process,
            decode.process,
        ),
        by_method(
            "tgi_batch_filter_duration",
            "Time spent composing batches per method (prefill or decode)",
            prefill.schedule,
            decode.schedule,
        ),
        histogram(
            "tgi_batch_concat_duration",
            "Time spent composing batches that take in new prompts",
            TGI_DURATION,
            ({"method": "decode"}, [prefill.schedule]),
        ),
        scalar(
            "tgi_batch_concat",
            "counter",
            "Batches that took in new prompts, by reason",
            ({"reason": "backpressure"}, lambda s: 0),
            ({"reason": "chunking"}, lambda s: numbers.mixed_steps),
            ({"reason": "wait_exceeded"}, lambda s: 0),
        ),
    ]


def _requests(s: Snapshot) -> float:
    return s.numbers.accepted + s.numbers.refused["template"] + _invalid(s) + _overloaded(s)


def _successes(s: Snapshot) -> float:
    return s.numbers.finished["stop"] + s.numbers.finished["length"]


def _invalid(s: Snapshot) -> float:
    refused = s.numbers.refused
    return refused["invalid"] + refused["too_large"] + refused["unsupported_media"]


def _overloaded(s: Snapshot) -> float:
    return s.numbers.refused["overloaded"] + s.numbers.refused["unavailable"]
