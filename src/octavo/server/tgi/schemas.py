"""The bodies of Text Generation Inference's native routes, requests and answers, field for field.

A null counts as absent everywhere. Fields that TGI does not have are refused, where TGI would ignore them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from octavo.server.about import about, not_built

__all__ = [
    "BestOfSequence",
    "ChatTokenizeResponse",
    "Details",
    "ErrorResponse",
    "FinishReason",
    "GenerateRequest",
    "GenerateResponse",
    "Info",
    "Parameters",
    "PrefillToken",
    "SimpleToken",
    "StreamDetails",
    "StreamResponse",
    "Token",
    "VertexInstance",
    "VertexRequest",
    "VertexResponse",
]

FinishReason = Literal["length", "eos_token", "stop_sequence"]

# Rust's usize and u64 on the wire; smaller bounds are checked with TGI's texts in ``validation``.
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seed = Annotated[int, msgspec.Meta(ge=0)]


class Parameters(Struct, kw_only=True, forbid_unknown_fields=True):
    """How to generate. What a field allows and what it is when absent is in ``validation``."""

    best_of: Annotated[
        _Count | None,
        about(
            "answers made, of which the likeliest is given, up to --max-best-of (2); needs sampling, not in streams",
            "1",
            minimum=1,
        ),
    ] = None
    temperature: Annotated[
        float | None, about("more makes answers vary; other than 1 it means sampling", "1", exclusiveMinimum=0)
    ] = None
    repetition_penalty: Annotated[
        float | None, about("above 1 makes tokens of input and answer less likely", "1", exclusiveMinimum=0)
    ] = None
    frequency_penalty: Annotated[
        float | None,
        about("taken from the score of a token for each time it was generated", "0", minimum=-2, maximum=2),
    ] = None
    top_k: Annotated[int | None, about("sample among this many of the likeliest tokens", "off", minimum=1)] = None
    top_p: Annotated[
        float | None,
        about(
            "sample among the likeliest tokens that together have this probability",
            "off",
            exclusiveMinimum=0,
            exclusiveMaximum=1,
        ),
    ] = None
    typical_p: Annotated[
        float | None,
        about(
            "sample among the most typical tokens that together have this probability",
            "off",
            exclusiveMinimum=0,
            exclusiveMaximum=1,
        ),
    ] = None
    do_sample: Annotated[
        bool | None, about("draw tokens instead of taking the likeliest", "false; true without ``parameters``")
    ] = None
    max_new_tokens: Annotated[
        _Count | None,
        about(
            "longest answer in tokens; with the input at most --max-total-tokens", "what the context leaves", minimum=1
        ),
    ] = None
    return_full_text: Annotated[bool | None, about("begin the text with the input", "false; on ``/`` true")] = None
    stop: Annotated[
        list[str] | None, about("texts that end the answer and stay in it, up to --max-stop-sequences (4)")
    ] = None
    truncate: Annotated[_Count | None, about("keep the last so many tokens of the input", "off", minimum=1)] = None
    watermark: Annotated[bool | None, about("mark the answer as generated", "false")] = None
    details: Annotated[bool | None, about("report tokens, finish reason and seed", "false")] = None
    decoder_input_details: Annotated[
        bool | None, about("report the tokens of the input too; not in streams", "false")
    ] = None
    seed: Annotated[_Seed | None, about("makes random choices repeatable; 64-bit, not with ``best_of``", "drawn")] = (
        None
    )
    top_n_tokens: Annotated[
        _Count | None, about("report so many likeliest tokens at each place, up to --max-top-n-tokens (5)", "0")
    ] = None
    grammar: Annotated[dict[str, Any] | None, not_built] = None
    adapter_id: Annotated[str | None, not_built] = None


class GenerateRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/``, ``/generate``, ``/generate_stream`` and ``/tokenize``; ``stream`` decides on ``/`` only."""

    inputs: Annotated[str, about("the text to go on from")]
    parameters: Annotated[Parameters | None, about("how to go on")] = None
    stream: Annotated[bool | None, about("on ``/``: send the answer as events while it is made", "false")] = None


class Token(Struct):
    """A generated token; ``logprob`` is null where it is minus infinity."""

    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillToken(Struct):
    """A token of the prompt; the first has no log-probability."""

    id: int
    text: str
    logprob: float | None


class BestOfSequence(Struct, kw_only=True):
    """One of the sequences that did not win."""

    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Details(Struct, kw_only=True):
    """What happened to the sequence that is returned; ``seed`` is set when it was sampled."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET


class GenerateResponse(Struct):
    """The answer of ``/generate``; ``/`` puts it into an array."""

    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(Struct, kw_only=True):
    """The details of a stream, in its last event."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(Struct):
    """One event: one token. ``index`` counts from 1; the text of the whole answer comes with the last token."""

    index: int
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class SimpleToken(Struct):
    """A token of ``/tokenize``; ``start`` and ``stop`` are places in the UTF-8 bytes of the input."""

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeResponse(Struct):
    """The answer of ``/chat_tokenize``."""

    tokenize_response: list[SimpleToken]
    templated_text: str


class VertexInstance(Struct, kw_only=True, forbid_unknown_fields=True):
    """One input of ``/vertex``; an instance may also be the body of a chat."""

    inputs: Annotated[str, about("the text to go on from")]
    parameters: Annotated[Parameters | None, about("how to go on")] = None


class VertexRequest(Struct, forbid_unknown_fields=True):
    """The body of ``/vertex``."""

    instances: list[msgspec.Raw]


class VertexResponse(Struct):
    """The texts for the instances, in their order."""

    predictions: list[str]


class Info(Struct, kw_only=True):
    """The answer of ``/info``."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None


class ErrorResponse(Struct):
    """Every error."""

    error: str
    error_type: str
