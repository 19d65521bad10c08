"""Stop strings: found across and inside tokens, held back, whatever the pieces; the first that is complete wins."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.detokenizer import StopStringScanner


def scan(stops: list[str], pieces: list[str], include: bool = False, quiet: int = 0) -> tuple[str, str | None]:
    """What is shown of the pieces, of which the first ``quiet`` may not stop, and what stopped it."""
    scanner = StopStringScanner(stops, include)
    shown = ""
    for place, piece in enumerate(pieces):
        safe, stop = scanner.feed(piece, may_stop=place >= quiet)
        shown += safe
        if stop is not None:
            return shown, stop
    return shown + scanner.flush(), None


def expected(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """By definition: the shortest beginning of the text that ends with a stop string, the longest one it ends with."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stop"),
    [
        (["END"], ["one END two"], "one ", "END"),
        (["END"], ["one E", "N", "D two"], "one ", "END"),
        (["END"], ["one E", "N", "d two"], "one ENd two", None),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["abcd", "bc"], ["abc", "d"], "a", "bc"),
        (["bc", "abc"], ["abcd"], "", "abc"),
        (["xyz", "b"], ["ab xyz"], "a", "b"),
        (["</s>", "<|end|>"], ["x<", "|", "end", "|", ">y"], "x", "<|end|>"),
        (["é!"], ["caf", "é", "!"], "caf", "é!"),
        ([], ["a", "b"], "ab", None),
    ],
)
def test_a_stop_string_ends_the_text_before_it(
    stops: list[str], pieces: list[str], shown: str, stop: str | None
) -> None:
    assert scan(stops, pieces) == (shown, stop)


def test_the_stop_string_is_part_of_the_text_when_asked_for() -> None:
    assert scan(["END"], ["one E", "ND two"], include=True) == ("one END", "END")


def test_what_may_begin_a_stop_string_is_held_back_and_nothing_else() -> None:
    scanner = StopStringScanner(["stop!"])
    assert scanner.feed("please sto") == ("please ", None)
    assert scanner.feed("re st") == ("store ", None)
    assert scanner.feed("op") == ("", None)
    assert scanner.flush() == "stop"
    assert scanner.flush() == ""


def test_a_stop_string_cannot_end_within_the_first_min_tokens_but_may_begin_there() -> None:
    assert scan(["END"], ["END", " x"], quiet=1) == ("END x", None)
    assert scan(["END"], ["EN", "D x"], quiet=1) == ("", "END")
    assert scan(["END"], ["END", "END"], quiet=1) == ("END", "END")


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    st.lists(st.text("ab\n", max_size=4), max_size=12),
    st.booleans(),
)
def test_the_result_depends_on_the_text_and_not_on_its_pieces(
    stops: list[str], pieces: list[str], include: bool
) -> None:
    text = "".join(pieces)
    assert scan(stops, pieces, include) == expected(stops, text, include)
    assert scan(stops, list(text), include) == scan(stops, [text], include)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.text("abc", max_size=30))
def test_text_is_never_held_back_longer_than_a_stop_string(stops: list[str], text: str) -> None:
    scanner = StopStringScanner(stops)
    shown = ""
    for end, character in enumerate(text, 1):
        safe, stop = scanner.feed(character)
        shown += safe
        if stop is not None:
            break
        held = text[len(shown) : end]
        assert text[:end] == shown + held
        assert held == "" or any(candidate.startswith(held) for candidate in stops)
