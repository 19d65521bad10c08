"""What clients are told about generated tokens, made from outputs of the engine without an engine."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from octavo.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.server.failures import Failure
from octavo.server.tgi.answers import EventWriter, Generated, answer, best_first, finish_reason, timing_headers
from octavo.server.tgi.schemas import GenerateRequest
from octavo.server.tgi.validation import Asked, Limits, validate
from tests.frontend.fakes import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
PROMPT = [257, *b"Q:"]


def asked(**parameters: Any) -> Asked:
    request = msgspec.convert({"inputs": "Q:", "parameters": parameters}, GenerateRequest)
    return validate(request, Limits(max_input_tokens=100, max_total_tokens=200))


def entry(token: int, logprob: float = -0.5, *more: tuple[int, float, int]) -> dict[int, Logprob]:
    def text(token_id: int) -> str:
        return TOKENIZER.decode([token_id], skip_special_tokens=False, continues=True)

    found = {token: Logprob(logprob, 1, text(token))}
    for other, value, rank in more:
        found[other] = Logprob(value, rank, text(other))
    return found


def completion(
    ids: Sequence[int],
    text: str,
    reason: str | None = None,
    stop: int | str | None = None,
    logprobs: Sequence[float] | None = None,
) -> CompletionOutput:
    values = [-0.5] * len(ids) if logprobs is None else logprobs
    entries = [entry(token, value) for token, value in zip(ids, values, strict=True)]
    return CompletionOutput(0, text, list(ids), None, entries, reason, stop)


def events(writer: EventWriter, *deltas: CompletionOutput) -> list[dict[str, Any]]:
    frames = b"".join([writer.events(delta) for delta in deltas])
    lines = frames.decode().split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines]


def generated(ids: Sequence[int], text: str, seed: int | None = None, max_new: int = 100, **more: Any) -> Generated:
    output = RequestOutput("r", None, PROMPT, None, [completion(ids, text, **more)], True)
    return Generated(output, max_new, seed)


@pytest.mark.parametrize(
    ("reason", "stop", "tokens", "said"),
    [
        ("length", None, 3, "length"),
        ("stop", None, 3, "eos_token"),
        ("stop", 7, 3, "eos_token"),
        ("stop", "x", 3, "stop_sequence"),
        ("stop", None, 10, "length"),
        ("stop", "x", 10, "length"),
    ],
)
def test_the_length_is_looked_at_before_the_end_token_and_stop_texts(
    reason: str, stop: int | str | None, tokens: int, said: str
) -> None:
    assert finish_reason(completion([], "", reason, stop), tokens, 10) == said


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_a_generation_that_did_not_end_by_itself_is_incomplete(reason: str | None) -> None:
    with pytest.raises(Failure) as raised:
        finish_reason(completion([], "", reason), 3, 10)
    assert raised.value.kind == "internal"


def test_a_stream_has_an_event_a_token_and_the_text_in_the_last() -> None:
    writer = EventWriter(asked(details=True), TOKENIZER, PROMPT, 100, 9)
    got = events(writer, completion(b"H", "H"), completion(b"i!", "i!"), completion([EOS], "", "stop"))
    assert [event["index"] for event in got] == [1, 2, 3, 4]
    assert [event["token"]["text"] for event in got] == ["H", "i", "!", "<eos>"]
    assert [event["token"]["special"] for event in got] == [False, False, False, True]
    assert [event["generated_text"] for event in got] == [None, None, None, "Hi!"]
    assert [event["details"] for event in got[:3]] == [None] * 3
    assert got[3]["details"] == {"finish_reason": "eos_token", "generated_tokens": 4, "seed": 9, "input_length": 3}
    assert all(set(event) == {"index", "token", "generated_text", "details"} for event in got)
    assert all(set(event["token"]) == {"id", "text", "logprob", "special"} for event in got)


def test_details_of_a_stream_come_only_when_asked_for() -> None:
    (got,) = events(EventWriter(asked(), TOKENIZER, PROMPT, 1, None), completion(b"H", "H", "length"))
    assert got["details"] is None
    assert got["generated_text"] == "H"


def test_the_full_text_begins_with_the_input() -> None:
    (got,) = events(
        EventWriter(asked(return_full_text=True), TOKENIZER, PROMPT, 1, None), completion(b"H", "H", "length")
    )
    assert got["generated_text"] == "Q:H"
    assert got["token"]["text"] == "H"


@pytest.mark.parametrize("text", ["é", "🙂", "a🙂b", "日本語", "x\u0301"])
def test_no_event_holds_half_a_character_and_all_add_up(text: str) -> None:
    data = text.encode()
    deltas = [completion([byte], "", None) for byte in data[:-1]]
    got = events(
        EventWriter(asked(), TOKENIZER, PROMPT, len(data), None), *deltas, completion(data[-1:], text, "length")
    )
    assert len(got) == len(data)
    assert "".join(event["token"]["text"] for event in got) == text == got[-1]["generated_text"]
    assert "\ufffd" not in "".join(event["token"]["text"] for event in got)


def test_bytes_that_never_become_a_character_end_up_in_the_last_token() -> None:
    data = "é".encode()[:1]
    got = events(EventWriter(asked(), TOKENIZER, PROMPT, 1, None), completion(data, "\ufffd", "length"))
    assert got[0]["token"]["text"] == got[0]["generated_text"] == "\ufffd"


def test_the_last_token_loses_what_follows_a_stop_string() -> None:
    # The token is "longer" than its text here: a real vocabulary has tokens such as " Paris" for the stop text " Pari".
    writer = EventWriter(asked(stop=["b"]), TOKENIZER, PROMPT, 100, None)
    got = events(writer, completion(b"a", "a"), completion(b"\xc3\xa9", "", "stop", "b"))
    assert "".join(event["token"]["text"] for event in got) == got[-1]["generated_text"]


def test_the_most_likely_tokens_are_in_order_and_no_more_than_asked() -> None:
    taken, more = ord("a"), [(ord("b"), -0.1, 1), (ord("c"), -0.2, 2), (ord("d"), -math.inf, 3)]
    entries = {taken: Logprob(-2.0, 4, "a"), **entry(taken, -2.0, *more)}
    entries[taken] = Logprob(-2.0, 4, "a")
    delta = CompletionOutput(0, "a", [taken], None, [entries], "length")
    (got,) = events(EventWriter(asked(top_n_tokens=3), TOKENIZER, PROMPT, 1, None), delta)
    assert [token["text"] for token in got["top_tokens"]] == ["b", "c"]
    assert got["token"]["logprob"] == -2.0


def test_a_log_probability_of_minus_infinity_is_null() -> None:
    delta = completion(b"a", "a", "length", None, [-math.inf])
    (got,) = events(EventWriter(asked(), TOKENIZER, PROMPT, 1, None), delta)
    assert got["token"]["logprob"] is None


def test_the_best_sequence_has_the_highest_mean_and_the_first_of_equals_wins() -> None:
    long_ = generated(b"abcd", "abcd", reason="length", logprobs=[-1.0] * 4)
    short = generated(b"ab", "ab", reason="length", logprobs=[-1.5, -1.5])
    same = generated(b"xy", "xy", reason="length", logprobs=[-1.0, -1.0])
    assert best_first([short, long_, same]) == [long_, short, same]


def test_an_answer_without_details_is_its_text() -> None:
    body = msgspec.json.encode(answer(asked(), [generated(b"Hi", "Hi", reason="length")], TOKENIZER))
    assert json.loads(body) == {"generated_text": "Hi"}


def test_details_have_every_field_and_no_empty_lists_that_were_not_asked_for() -> None:
    sequence = generated([*b"H", EOS], "H", seed=4, reason="stop")
    body = json.loads(msgspec.json.encode(answer(asked(details=True), [sequence], TOKENIZER)))
    assert body == {
        "generated_text": "H",
        "details": {
            "finish_reason": "eos_token",
            "generated_tokens": 2,
            "seed": 4,
            "prefill": [],
            "tokens": [
                {"id": ord("H"), "text": "H", "logprob": -0.5, "special": False},
                {"id": EOS, "text": "<eos>", "logprob": -0.5, "special": True},
            ],
        },
    }


def test_prefill_has_the_prompt_with_null_first() -> None:
    sequence = generated(b"H", "H", reason="length")
    sequence.output.prompt_logprobs = [None, entry(ord("Q"), -3.0), entry(ord(":"), -4.0)]
    details = answer(asked(decoder_input_details=True), [sequence], TOKENIZER).details
    assert json.loads(msgspec.json.encode(details))["prefill"] == [
        {"id": 257, "text": "<bos>", "logprob": None},
        {"id": ord("Q"), "text": "Q", "logprob": -3.0},
        {"id": ord(":"), "text": ":", "logprob": -4.0},
    ]


def test_the_other_sequences_are_in_the_details() -> None:
    parameters = {"best_of": 2, "do_sample": True, "details": True, "top_n_tokens": 1, "return_full_text": True}
    sequences = [generated(b"a", "a", seed=1, reason="length"), generated(b"b", "b", seed=2, reason="length")]
    body = json.loads(msgspec.json.encode(answer(asked(**parameters), sequences, TOKENIZER)))
    assert body["generated_text"] == "Q:a"
    (other,) = body["details"]["best_of_sequences"]
    assert (other["generated_text"], other["seed"], other["finish_reason"]) == ("Q:b", 2, "length")
    assert other["top_tokens"] == [[other["tokens"][0]]]
    assert body["details"]["top_tokens"] == [[body["details"]["tokens"][0]]]


def test_the_headers_say_where_the_time_went() -> None:
    metrics = RequestMetrics(arrival_time=0.25, scheduled_time=0.5, finished_time=0.875)
    sequence = generated(b"abcd", "abcd", reason="length")
    headers = timing_headers(asked(), sequence, metrics, arrival=0.0, now=1.0)
    assert headers == {
        "x-compute-type": "cpu+optimized",
        "x-compute-time": "1.000000",
        "x-compute-characters": "2",
        "x-total-time": "1000",
        "x-validation-time": "250",
        "x-queue-time": "250",
        "x-inference-time": "500",
        "x-time-per-token": "125",
        "x-prompt-tokens": "3",
        "x-generated-tokens": "4",
    }
