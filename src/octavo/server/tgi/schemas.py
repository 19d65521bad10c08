"""The bodies of Text Generation Inference's native routes, requests and answers, field for field.

A null counts as absent everywhere. Fields that TGI does not have are refused, where TGI would ignore them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

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

    best_of: _Count | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: _Count | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: _Count | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: _Seed | None = None
    top_n_tokens: _Count | None = None
    grammar: dict[str, Any] | None = None
    adapter_id: str | None = None


class GenerateRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/``, ``/generate``, ``/generate_stream`` and ``/tokenize``; ``stream`` decides on ``/`` only."""

    inputs: str
    parameters: Parameters | None = None
    stream: bool | None = None


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

    inputs: str
    parameters: Parameters | None = None


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
