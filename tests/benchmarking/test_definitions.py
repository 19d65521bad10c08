"""TTFT, ITL, TPOT, E2EL and what follows from them, against timelines worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.benchmarking.answers import Answer, Mark, apportion
from octavo.benchmarking.client import Exchange
from octavo.benchmarking.dialects import dialect_of
from octavo.benchmarking.figures import detailed, summarise
from octavo.benchmarking.sse import events
from octavo.benchmarking.workload import WordSource
from tests.benchmarking.fake_server import WordTokenizer, completion, stop, usage

WORDS = WordSource(WordTokenizer())


def chat(**delta: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": None}]}).encode() + b"\n\n"


def answer(backend: str, *pieces: tuple[float, bytes], sent: float = 10.0, role_counts: bool = False) -> Answer:
    """What an exchange with these pieces comes to."""
    exchange = Exchange(sent=sent, ended=pieces[-1][0] if pieces else sent, status=200, pieces=list(pieces))
    read = dialect_of(backend).read(exchange, role_counts=role_counts)
    read.settle(WORDS)
    return read


def test_one_token_an_event_is_measured_as_vllm_does() -> None:
    one = answer(
        "openai",
        (10.5, completion(" a")),
        (10.6, completion(" b")),
        (10.8, completion(" c")),
        (10.9, usage(7, 3) + stop()),
    )
    assert one.ok
    assert one.ttft == pytest.approx(0.5)
    assert one.gaps(per_token=True) == pytest.approx([0.1, 0.2])
    assert one.latency == pytest.approx(0.8)  # to the last event with choices: the usage event does not count
    assert one.tpot == pytest.approx(0.15)
    assert (one.tokens, one.server_input_tokens) == (3, 7)


def test_the_usage_event_ends_a_chat() -> None:
    one = answer("openai-chat", (10.5, chat(content="a")), (10.7, chat(content=" b")), (11.0, usage(1, 2)))
    assert one.latency == pytest.approx(1.0)
    assert one.tpot == pytest.approx(0.5)


def test_the_gap_before_an_event_of_several_tokens_is_divided_by_them() -> None:
    one = answer("openai", (10.5, completion(" a b")), (11.1, completion(" c d e")), (11.2, usage(1, 5)))
    assert [mark.tokens for mark in one.marks] == [2, 3]
    assert one.gaps(per_token=True) == pytest.approx([0.2] * 3)
    assert one.gaps(per_token=False) == pytest.approx([0.6])


def test_counts_in_every_event_are_believed() -> None:
    def counted(text: str, output: int) -> bytes:
        numbers = {"prompt_tokens": 2, "completion_tokens": output}
        return b"data: " + json.dumps({"choices": [{"text": text}], "usage": numbers}).encode() + b"\n\n"

    one = answer("openai", (11, counted("xyz", 1)), (12, counted("x", 4)), (13, counted("xx", 5)))
    assert [mark.tokens for mark in one.marks] == [1, 3, 1]
    assert one.gaps(per_token=True) == pytest.approx([1 / 3] * 3 + [1])


def test_logprobs_tell_the_tokens_of_an_event() -> None:
    logprobs = {"tokens": ["a", "b", "c"]}
    one = answer("openai", (11, completion("a", logprobs={"tokens": ["a"]})), (12, completion("x", logprobs=logprobs)))
    assert [mark.tokens for mark in one.marks] == [1, 3]
    assert one.tokens == 4


def test_without_usage_the_text_is_counted() -> None:
    assert answer("openai", (11, completion("one two")), (12, completion(" three"))).tokens == 3


def test_numbers_with_the_last_event_only_are_the_whole_answers() -> None:
    last = json.dumps({"choices": [{"text": " d"}], "usage": {"completion_tokens": 4}}).encode()
    one = answer("openai", (11, completion(" a b")), (12, completion(" c")), (13, b"data: " + last + b"\n\n"))
    assert [mark.tokens for mark in one.marks] == [2, 1, 1]


def test_an_event_that_only_names_the_role_is_no_token_unless_asked_for() -> None:
    pieces = ((10.1, chat(role="assistant", content="")), (10.5, chat(content="a")), (10.6, chat(content=" b")))
    assert answer("openai-chat", *pieces).ttft == pytest.approx(0.5)
    assert answer("openai-chat", *pieces, role_counts=True).ttft == pytest.approx(0.1)


def test_a_closing_event_without_a_token_adds_no_gap() -> None:
    end = b"data: " + json.dumps({"choices": [{"text": "", "finish_reason": "length"}]}).encode() + b"\n\n"
    one = answer("openai", (11, completion(" a b")), (12, completion(" c")), (15, end), (15, usage(1, 3)))
    assert one.gaps(per_token=True) == pytest.approx([1.0])
    assert one.latency == pytest.approx(5.0)


def test_tgi_sends_a_token_an_event() -> None:
    def token(text: str, **more: Any) -> bytes:
        return b"data:" + json.dumps({"token": {"id": 1, "text": text}, **more}).encode() + b"\n\n"

    end = {"generated_text": "ab", "details": {"generated_tokens": 2, "input_length": 9}}
    one = answer("tgi", (11, token("a")), (11.5, token("b", **end)))
    assert (one.ttft, one.tpot, one.tokens, one.server_input_tokens) == (1.0, 0.5, 2, 9)


@pytest.mark.parametrize(
    ("backend", "piece", "said"),
    [
        ("openai", b'data: {"error": {"message": "too much"}}\n\n', "too much"),
        ("tgi", b'data: {"error": "bad", "error_type": "generation"}\n\n', "bad"),
        ("openai", b"data: {nonsense\n\n", "cannot be read"),
        ("openai", b": keep-alive\n\ndata: [DONE]\n\n", "without a token"),
        ("tgi", b"", "without a token"),
    ],
)
def test_an_answer_that_says_nothing_or_an_error_has_failed(backend: str, piece: bytes, said: str) -> None:
    one = answer(backend, (11.0, piece))
    assert one.error is not None
    assert said in one.error


def test_events_are_found_however_the_body_is_cut() -> None:
    body = b": hello\n\ndata: one\r\n\r\nevent: x\ndata: two\ndata: lines\n\ndata: three"
    whole = [b"one", b"two\nlines", b"three"]
    for size in range(1, len(body) + 1):
        pieces = [(float(place), body[place : place + size]) for place in range(0, len(body), size)]
        assert [data for _, data in events(pieces)] == whole


def test_an_event_has_the_time_its_end_came() -> None:
    assert list(events([(1.0, b"data: a"), (2.0, b"b\n"), (3.0, b"\ndata: c\n\n")])) == [(3.0, b"ab"), (3.0, b"c")]


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [
        (5, [2, 3], [2, 3]),
        (4, [10, 1, 1], [2, 1, 1]),
        (2, [1, 1, 1], [1, 1, 0]),
        (3, [0, 0], [2, 1]),
        (3, [3, 0], [3, 0]),
    ],
)
def test_tokens_are_shared_out_whole(total: int, weights: list[float], shares: list[int]) -> None:
    assert apportion(total, weights) == shares


# --- a run of three requests ------------------------------------------------------------------------------------------


def three() -> list[Answer]:
    """Two requests that end and one that fails, over four seconds."""
    first = Answer(0.0, 3.0, 10, [Mark(1.0, "", 1), Mark(2.0, "", 1), Mark(3.0, "", 2)], output_tokens=4)
    second = Answer(1.0, 2.5, 20, [Mark(2.5, "", 1)], output_tokens=1)
    return [first, second, Answer(0.5, 0.6, 30, error="HTTP 500")]


def test_figures_of_a_run() -> None:
    figures = summarise(three(), 4.0, percentiles=(50, 99.9), metrics=("ttft", "tpot", "itl", "e2el"))
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 5)
    assert figures["request_throughput"] == pytest.approx(0.5)
    assert figures["output_throughput"] == pytest.approx(1.25)
    assert figures["total_token_throughput"] == pytest.approx(8.75)
    assert figures["request_goodput"] is None
    assert figures["mean_ttft_ms"] == pytest.approx(1250)
    assert figures["std_ttft_ms"] == pytest.approx(250)
    assert figures["p99.9_ttft_ms"] == pytest.approx(1499.5)
    assert figures["mean_tpot_ms"] == pytest.approx(2000 / 3)  # only the first has a token after its first
    assert figures["median_itl_ms"] == pytest.approx(500)  # 1 s, then 1 s for two
    assert figures["mean_itl_ms"] == pytest.approx(2000 / 3)
    assert figures["p50_e2el_ms"] == pytest.approx(2250)


def test_figures_per_user_and_per_device() -> None:
    figures = summarise(three(), 4.0, num_devices=2)
    assert figures["per_user_output_throughput"] == pytest.approx((4 / 3 + 1 / 1.5) / 2)
    assert figures["per_user_output_speed"] == pytest.approx(1.5)  # 1 / mean TPOT
    assert figures["per_device_output_throughput"] == pytest.approx(0.625)


def test_peaks_are_of_the_best_second_and_the_fullest_moment() -> None:
    figures = summarise(three(), 4.0)
    assert figures["max_output_tokens_per_s"] == 2  # 2.0 and 2.5 fall into one second, the two at 3.0 into the next
    assert figures["max_concurrent_requests"] == 2
    apart = [Answer(0, 1, 1, [Mark(1, "", 1)], output_tokens=1), Answer(1, 2, 1, [Mark(2, "", 1)], output_tokens=1)]
    assert summarise(apart, 2.0)["max_concurrent_requests"] == 1


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({"ttft": 1000}, 1),
        ({"ttft": 1500}, 2),
        ({"tpot": 600}, 1),
        ({"tpot": 700, "e2el": 3000}, 2),
        ({"ttft": 1000, "e2el": 2000}, 0),
    ],
)
def test_goodput_counts_completed_requests_that_keep_every_limit(limits: dict[str, float], good: int) -> None:
    assert summarise(three(), 4.0, limits=limits)["request_goodput"] == pytest.approx(good / 4)


def test_a_run_in_which_all_fail_has_figures_too() -> None:
    figures = summarise([Answer(0, 1, error="x")], 1.0, limits={"ttft": 1})
    assert (figures["completed"], figures["mean_ttft_ms"], figures["request_goodput"]) == (0, 0.0, 0.0)


def test_details_have_an_entry_for_each_request() -> None:
    lists = detailed(three())
    assert {len(values) for values in lists.values()} == {3}
    assert lists["output_lens"] == [4, 1, 0]
    assert lists["itls"] == [[1.0, 0.5, 0.5], [], []]
    assert lists["errors"] == ["", "", "HTTP 500"]
    vllms = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}
    assert vllms <= lists.keys()
