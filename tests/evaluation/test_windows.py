"""Windows cover a text, count every position once, and are refused where they cannot be cut."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.evaluation.windows import alternating_windows, text_windows


def predicted(ids: list[int], length: int, stride: int | None, prefix: list[int]) -> list[int]:
    """The positions of the text that some window predicts and counts."""
    found = []
    for window in text_windows("t", ids, length, stride=stride, prefix=prefix):
        first = max(0, window.seen - 1)
        found += [window.start + row + 1 - len(prefix) for row in range(first, len(window.ids) - 1)]
    return found


@pytest.mark.parametrize("count", [2, 9, 10, 11, 64, 65])
def test_windows_without_overlap_predict_all_but_the_first_token_of_each(count: int) -> None:
    ids = list(range(count))
    windows = list(text_windows("t", ids, 10))
    assert [token for window in windows for token in window.ids][: count - 1] == ids[: count - 1]
    starts = {window.start for window in windows}
    last = count - (count % 10 == 1 and count > 1)
    assert predicted(ids, 10, None, []) == [place for place in range(last) if place not in starts]


@pytest.mark.parametrize("count", [7, 10, 23, 40])
@pytest.mark.parametrize("prefix", [[], [99]])
def test_overlapping_windows_count_each_position_once(count: int, prefix: list[int]) -> None:
    expected = list(range(0 if prefix else 1, count))
    found = predicted(list(range(count)), 10, 4, prefix)
    assert found == expected[: len(found)]
    assert len(expected) - len(found) <= 1  # one token left over makes no window


def test_a_prefix_begins_every_window() -> None:
    windows = list(text_windows("t", list(range(30)), 11, prefix=[99]))
    assert [window.ids[0] for window in windows] == [99, 99, 99]
    assert [window.ids[1] for window in windows] == [0, 10, 20]
    assert all(len(window.ids) == 11 for window in windows)


def test_no_more_windows_than_asked_for() -> None:
    assert len(list(text_windows("t", list(range(100)), 10, most=3))) == 3


@pytest.mark.parametrize(("length", "stride"), [(1, None), (10, 0), (10, 11)])
def test_impossible_windows_are_refused(length: int, stride: int | None) -> None:
    with pytest.raises(ConfigError, match=f"windows of {length} tokens"):
        list(text_windows("t", list(range(100)), length, stride=stride))


def test_texts_take_turns_and_their_beginnings_are_left_out() -> None:
    windows = alternating_windows([("a", list(range(35))), ("b", list(range(100, 125)))], 3, 10)
    assert [(window.text, window.start, window.ids[0]) for window in windows] == [
        ("a", 10, 10), ("b", 10, 110), ("a", 20, 20)
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="give 3 windows of 10 tokens, 5 were asked for"):
        alternating_windows([("a", list(range(35))), ("b", list(range(25)))], 5, 10)
