"""The frames of the WebSocket: what a client may send, and the text of what the server sends."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from octavo.errors import ParameterError
from octavo.server.failures import Failure, Kind, failure_of
from octavo.server.openai.schemas_chat import ChatRequest
from octavo.server.openai.schemas_completions import CompletionRequest
from octavo.server.pacing import MAX_CREDITS

__all__ = [
    "ChatStart",
    "CompletionStart",
    "Control",
    "Deltas",
    "Head",
    "check_start",
    "decode_control",
    "decode_head",
    "frame",
]

MAX_ID = 128  # characters

_encode = msgspec.json.Encoder().encode


class Head(Struct):
    """What tells the kind of a frame; its other fields are read by the type it turns out to be."""

    type: str
    id: str
    messages: msgspec.Raw | UnsetType = UNSET


class ChatStart(ChatRequest, kw_only=True, forbid_unknown_fields=True):
    """A request with a conversation: the fields of ``/v1/chat/completions``, an id for the frames, credits."""

    type: Literal["start"]
    id: str
    credits: int | None = None


class CompletionStart(CompletionRequest, kw_only=True, forbid_unknown_fields=True):
    """A request with a prompt: the fields of ``/v1/completions``, an id for the frames, credits.

    ``prompt_token_ids`` is the prompt as token ids, in place of ``prompt``.
    """

    type: Literal["start"]
    id: str
    credits: int | None = None
    prompt_token_ids: list[int] | None = None


class Control(Struct, kw_only=True, forbid_unknown_fields=True):
    """A frame about a request that runs. ``tokens`` belongs to credit."""

    type: Literal["credit", "cancel", "pause", "resume"]
    id: str
    tokens: int | None = None


_heads = msgspec.json.Decoder(Head)
_controls = msgspec.json.Decoder(Control)


def decode_head(text: str) -> Head:
    """The kind of a frame; a Failure when it is no frame at all."""
    try:
        head = _heads.decode(text)
    except RecursionError:
        raise Failure(Kind.invalid, "This is not a frame: it is nested too deeply.") from None
    except msgspec.DecodeError as error:
        failure = failure_of(error)
        raise Failure(Kind.invalid, f"This is not a frame: {failure.message}", param=failure.param) from None
    if not 1 <= len(head.id) <= MAX_ID:
        raise ParameterError("id", head.id, f"a string of 1 to {MAX_ID} characters")
    return head


def decode_control(text: str) -> Control:
    """A frame about a request that runs; a Failure or ParameterError when it is not one."""
    try:
        control = _controls.decode(text)
    except msgspec.ValidationError as error:
        raise failure_of(error) from None
    if control.type != "credit":
        if control.tokens is not None:
            raise ParameterError("tokens", control.tokens, f"absent in a frame of type {control.type}")
    elif control.tokens is None or not 1 <= control.tokens <= MAX_CREDITS:
        raise ParameterError("tokens", control.tokens, f"an integer from 1 to {MAX_CREDITS}")
    return control


def check_start(request: ChatStart | CompletionStart) -> None:
    """Refuse what has no meaning in a request on a socket, and put what is left in the form of a streamed request."""
    if request.credits is not None and not 1 <= request.credits <= MAX_CREDITS:
        raise ParameterError("credits", request.credits, f"null or an integer from 1 to {MAX_CREDITS}")
    if request.stream is False:
        raise ParameterError("stream", False, "null or true: frames come as the tokens do")
    if request.stream_options is not None:
        raise ParameterError("stream_options", request.stream_options, "null: the end frame tells the usage")
    if request.echo:
        raise ParameterError("echo", True, "null or false: frames hold what was generated")
    if request.credits is not None and request.stream_interval is not None:
        raise ParameterError("stream_interval", request.stream_interval, "null with credits, which say what is sent")
    request.stream = True
    if isinstance(request, CompletionStart):
        _check_prompt(request)


def _check_prompt(request: CompletionStart) -> None:
    if request.prompt_token_ids is not None:
        if request.prompt is not None:
            raise ParameterError("prompt_token_ids", "...", "null beside prompt", "give prompt or prompt_token_ids")
        request.prompt = list(request.prompt_token_ids)
    elif isinstance(request.prompt, list) and not all(isinstance(item, int) for item in request.prompt):
        raise ParameterError(
            "prompt", len(request.prompt), "one prompt",
            "prompt must be one text or one list of token ids: start one request for each prompt",
        )  # fmt: skip


def frame(type_: str, id_: str | None, **fields: Any) -> str:
    """A frame of the server that is not sent for every token."""
    start = {"type": type_} if id_ is None else {"type": type_, "id": id_}
    return _encode(start | fields).decode()


class Deltas:
    """Writes the delta frames of one request: what is the same in each is encoded once."""

    def __init__(self, id_: str) -> None:
        self._start = b'{"type":"delta","id":%b,"index":' % _encode(id_)
        self._heads: list[bytes] = []

    def text(self, index: int, text: str) -> str:
        """A frame with nothing but text."""
        heads = self._heads
        while index >= len(heads):
            heads.append(b'%b%d,"text":' % (self._start, len(heads)))
        return b"".join((heads[index], _encode(text), b"}")).decode()

    def full(self, index: int, text: str, fields: dict[str, Any]) -> str:
        """A frame with more fields than the text."""
        parts = [self.text(index, text)[:-1]]
        parts += [f',"{name}":{_encode(value).decode()}' for name, value in fields.items()]
        parts.append("}")
        return "".join(parts)
