"""Tokens with their places in the text, and which kind of request a body is."""

from __future__ import annotations

import pytest

from octavo.server.tgi.schemas import SimpleToken
from octavo.server.tgi.shapes import Shape, shape_of
from octavo.server.tgi.tokenize import simple_tokens
from tests.frontend.fakes import BOS, byte_tokenizer


def test_a_token_the_tokenizer_adds_has_no_place() -> None:
    assert simple_tokens(byte_tokenizer(), "ab") == [
        SimpleToken(BOS, "", 0, 0),
        SimpleToken(ord("a"), "a", 0, 1),
        SimpleToken(ord("b"), "b", 1, 2),
    ]
    assert len(simple_tokens(byte_tokenizer(), "ab", add_special_tokens=False)) == 2


def test_places_count_bytes_and_parts_of_a_character_have_its_place() -> None:
    tokens = simple_tokens(byte_tokenizer(), "aéb", add_special_tokens=False)
    assert [(token.text, token.start, token.stop) for token in tokens] == [
        ("a", 0, 1),
        ("é", 1, 3),
        ("é", 1, 3),
        ("b", 3, 4),
    ]


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        (b'{"inputs": "a"}', Shape.generate),
        (b'{"messages": []}', Shape.chat),
        (b'{"prompt": 1}', Shape.completion),
        (b'{"prompt": "a", "inputs": null}', Shape.generate),
        (b'{"messages": [], "prompt": "a"}', Shape.chat),
        (b'{"text": "a"}', Shape.other),
        (b'["inputs"]', Shape.other),
        (b'"inputs"', Shape.other),
        (b"{", Shape.other),
        (b"", Shape.other),
        (b'{"inputs": "\xff"}', Shape.generate),
    ],
)
def test_a_body_is_told_by_its_fields(body: bytes, shape: Shape) -> None:
    assert shape_of(body) is shape
