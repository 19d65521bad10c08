"""A server whose model says what the prompt tells it to: the whole dialect in milliseconds, without a real model.

The text after the last ``say:`` of the prompt is the answer, a token a byte. Without one it goes on with the alphabet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import httpx

from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.loading import LoadedModel
from tests.frontend.fakes import EOS, ScriptBackend, load_fake
from tests.server.running import RunningServer

__all__ = ["CONTEXT", "events", "refusal", "scripted_model", "scripted_server"]

CONTEXT = 512  # tokens of prompt and answer
_ALPHABET = b"abcdefghijklmnopqrstuvwxyz"


def _told(known: Sequence[int], prompt: int) -> int:
    text = bytes(token for token in known[:prompt] if token < 256)
    place = len(known) - prompt
    if b"say:" not in text:
        return _ALPHABET[place % 26]
    answer = text.rpartition(b"say:")[2].partition(b"(assistant)")[0]
    return answer[place] if place < len(answer) else EOS


def scripted_model(*, template: bool = True, step: float = 0.001, **options: Any) -> LoadedModel:
    """The model of this module; a step takes ``step`` seconds; ``options`` are those of the engine."""
    backend = ScriptBackend(_told, num_blocks=512, max_model_len=CONTEXT)
    backend.before_step = lambda _: time.sleep(step)
    model = load_fake(backend, **options)
    if not template:
        model.tokenizer.chat_templates.clear()
    return model


@contextmanager
def scripted_server(
    *, template: bool = True, step: float = 0.001, engine: dict[str, Any] | None = None, **options: Any
) -> Iterator[RunningServer]:
    """A server of it; ``engine`` and ``options`` are those of the engine and of the server."""
    with (
        closing(AsyncLLM.from_loaded(scripted_model(template=template, step=step, **(engine or {})))) as llm,
        RunningServer(llm=llm, **{"served_model_name": "scripted", **(engine or {}), **options}) as server,
    ):
        yield server


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream's events, which has to be marked as ended."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer that has to be one, in OpenAI's nested shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert isinstance(error["message"], str)
    assert error["message"]
    return error
