"""The shapes log-probabilities have on the wire."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from octavo.frontend.outputs import Logprob
from octavo.server.openai.logprobs import LogprobWriter, prompt_logprobs_json
from tests.frontend.fakes import byte_tokenizer

# The chosen token first, as the engine reports it: here the third most probable one.
CHOSEN_LAST = {99: Logprob(-3.0, 3, "c"), 97: Logprob(-0.5, 1, "a"), 98: Logprob(-1.0, 2, "b")}
CHOSEN_FIRST = {97: Logprob(-0.5, 1, "a"), 98: Logprob(-1.0, 2, "b")}


def writer(top: int, *, as_ids: bool = False) -> LogprobWriter:
    return LogprobWriter(byte_tokenizer(), top, as_ids=as_ids)


def chat(top: int, token: int, position: dict[int, Logprob], **more: Any) -> dict[str, Any]:
    found = msgspec.to_builtins(writer(top, **more).chat([token], [position]))
    assert found["refusal"] is None
    (entry,) = found["content"]
    return entry  # type: ignore[no-any-return]


def test_chat_has_the_token_its_bytes_and_the_most_probable_ones_in_order() -> None:
    assert chat(2, 97, CHOSEN_FIRST) == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.0, "bytes": [98]},
        ],
    }


def test_a_chosen_token_that_is_not_among_the_most_probable_is_not_in_their_list() -> None:
    entry = chat(2, 99, CHOSEN_LAST)
    assert (entry["token"], entry["logprob"]) == ("c", -3.0)
    assert [top["token"] for top in entry["top_logprobs"]] == ["a", "b"]
    assert chat(0, 99, CHOSEN_LAST)["top_logprobs"] == []


def test_half_a_character_has_its_own_bytes() -> None:
    entry = chat(0, 0xC3, {0xC3: Logprob(-1.0, 1, "\ufffd")})
    assert entry["bytes"] == [0xC3]
    assert entry["token"] == "\ufffd"


def test_tokens_can_be_named_by_their_ids() -> None:
    entry = chat(1, 97, CHOSEN_FIRST, as_ids=True)
    assert entry["token"] == "token_id:97"
    assert entry["bytes"] == [97]
    assert entry["top_logprobs"][0]["token"] == "token_id:97"


def test_minus_infinity_is_written_as_vllm_writes_it() -> None:
    assert chat(1, 97, {97: Logprob(-math.inf, 1, "a")})["logprob"] == -9999.0


def test_completions_have_four_lists_and_offsets_that_go_on() -> None:
    found, offset = writer(2).completion([99, 97], [CHOSEN_LAST, CHOSEN_FIRST], 10)
    assert found.tokens == ["c", "a"]
    assert found.text_offset == [10, 11]
    assert found.token_logprobs == [-3.0, -0.5]
    assert found.top_logprobs == [{"c": -3.0, "a": -0.5, "b": -1.0}, {"a": -0.5, "b": -1.0}]
    assert offset == 12


def test_no_more_alternatives_are_shown_than_were_asked_for() -> None:
    found, _ = writer(1).completion([99], [CHOSEN_LAST], 0)
    assert found.top_logprobs == [{"c": -3.0, "a": -0.5}]


def test_the_first_token_of_a_prompt_has_no_logprob() -> None:
    found, offset = writer(1).completion([97, 98], [None, {98: Logprob(-2.0, 5, "b")}], 0)
    assert found.tokens == ["a", "b"]
    assert found.token_logprobs == [None, -2.0]
    assert found.top_logprobs == [None, {"b": -2.0}]
    assert offset == 2


def test_of_tokens_with_one_text_the_more_probable_one_is_shown() -> None:
    same = {97: Logprob(-0.5, 1, "x"), 98: Logprob(-1.0, 2, "x")}
    found, _ = writer(5).completion([97], [same], 0)
    assert found.top_logprobs == [{"x": -0.5}]


def test_prompt_logprobs_go_by_token_id() -> None:
    assert prompt_logprobs_json([None, {98: Logprob(-math.inf, 5, "b")}]) == [
        None,
        {"98": {"logprob": -9999.0, "rank": 5, "decoded_token": "b"}},
    ]
    assert prompt_logprobs_json(None) == []
