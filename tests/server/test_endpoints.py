"""Answers as JSON: long ones hold as short ones do, and are made outside the event loop."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest
from starlette.responses import Response

from octavo.server.endpoints import json_response, long_json_response


class _Item(msgspec.Struct):
    number: int
    text: str


class _Answer(msgspec.Struct, rename="camel"):
    some_items: list[_Item]
    text: str
    nothing: list[int] | None = None


def _answer(items: int) -> _Answer:
    return _Answer([_Item(number, f"é{number}") for number in range(items)], 'a"b')


@pytest.mark.parametrize("items", [0, 1, 4096, 4097, 20_000])
def test_an_answer_is_the_same_whole_and_in_pieces(items: int) -> None:
    answer = _answer(items)
    for content in (answer, answer.some_items):
        made = asyncio.run(long_json_response(lambda content=content: content, items))
        assert bytes(made.body) == bytes(json_response(content).body)
        assert made.headers["content-type"] == "application/json"


def test_only_an_answer_of_many_items_is_made_in_another_thread() -> None:
    makers: list[threading.Thread] = []

    def make() -> list[int]:
        makers.append(threading.current_thread())
        return [1]

    async def both() -> list[Response]:
        return [await long_json_response(make, items) for items in (10, 1_000_000)]

    assert [bytes(response.body) for response in asyncio.run(both())] == [b"[1]", b"[1]"]
    assert [maker is threading.main_thread() for maker in makers] == [True, False]
