"""A measurement sends what was asked for, when it was asked for, and reports all of it."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from octavo.benchmarking.client import Client, Exchange, Target
from octavo.benchmarking.datasets import Work
from octavo.benchmarking.load import Counts, Shot, drive
from octavo.benchmarking.options import BenchOptions
from octavo.benchmarking.session import Run, ServerError, look_up, measure
from octavo.benchmarking.speculation import counters, speculation
from octavo.benchmarking.text import result_text
from octavo.benchmarking.workload import WordSource
from octavo.errors import ConfigError
from tests.benchmarking.fake_server import FakeServer, WordTokenizer, letters, stop

WORDS = WordSource(WordTokenizer())


async def run(server: FakeServer, work: Sequence[Work] | None = None, **options: Any) -> Run:
    chosen = BenchOptions(**{"num_prompts": 6, "input_len": 4, "output_len": 3, **options})
    found = await look_up("fake", server.url, chosen)
    return await measure(found, chosen, WORDS, tokenizer_id="words", work=work)


async def test_every_request_is_sent_and_counted() -> None:
    with FakeServer() as server:
        result = (await run(server, ignore_eos=True, save_detailed=True, request_id_prefix="mine-")).result
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (24, 18)
    assert result["server_input_tokens"] == 24
    body = server.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["ignore_eos"]) == ("fake", 3, 0.0, True)
    assert body["stream_options"] == {"include_usage": True}
    assert "x-request-id: mine-0" in server.heads[0].lower()
    assert result["generated_texts"] == [" w w w"] * 6


async def test_the_result_has_vllms_keys() -> None:
    with FakeServer() as server:
        result = (await run(server, percentile_metrics="ttft,tpot,itl,e2el")).result
    names = (
        "date backend endpoint_type label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency "
    )
    names += "duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput "
    names += "output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests"
    assert set(names.split()) <= result.keys()
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p99")} <= result.keys()
    assert result["request_rate"] == "inf"
    json.dumps(result)


async def test_several_tokens_an_event_are_several_gaps() -> None:
    with FakeServer(functools.partial(letters, at_once=4), pause=0.01) as server:
        per_token = await run(server, output_len=8, save_detailed=True)
        per_event = await run(server, output_len=8, save_detailed=True, definitions="vllm")
    assert [len(gaps) for gaps in per_token.result["itls"]] == [4] * 6
    assert [len(gaps) for gaps in per_event.result["itls"]] == [1] * 6
    assert per_token.result["chunk_tokens"] == [[4, 4]] * 6


async def test_no_more_are_in_flight_than_allowed() -> None:
    with FakeServer(pause=0.003) as server:
        result = (await run(server, max_concurrency=2)).result
    assert server.most == 2
    assert result["max_concurrent_requests"] == 2
    assert result["median_client_queue_ms"] > 0


async def test_a_step_waits_for_the_one_before_it() -> None:
    ended: list[str] = []
    begun: list[list[str]] = []

    def script(body: Mapping[str, Any]) -> list[bytes]:
        begun.append([*ended, body["prompt"]])
        ended.append(body["prompt"])
        return letters(body)

    with FakeServer(script, pause=0.003) as server:
        work = [Work("a1", 1, 2), Work("a2", 1, 2, after=0), Work("b1", 1, 2), Work("a3", 1, 2, after=1)]
        answers = (await run(server, work)).answers
    assert answers[0].ended <= answers[1].sent
    assert answers[1].ended <= answers[3].sent
    assert answers[2].sent < answers[0].ended


async def test_warm_ups_and_the_ready_check_are_not_counted() -> None:
    with FakeServer() as server:
        result = (await run(server, num_warmups=2, ready_check_timeout_sec=5)).result
        prompts = [body["prompt"] for body in server.bodies]
    assert result["completed"] == 6
    assert len(prompts) == 9
    assert not set(prompts[1:3]) & set(prompts[3:])


async def test_failures_are_counted_and_explained() -> None:
    with FakeServer(status=500) as server:
        result = (await run(server)).result
    assert (result["completed"], result["failed"]) == (0, 6)
    assert result["distinct_errors"] == ['HTTP 500 {"error": {"message": "no"}}']


async def test_a_server_that_never_gets_ready_ends_the_measurement() -> None:
    with FakeServer(status=503) as server:
        with pytest.raises(ServerError, match="not ready"):
            await run(server, ready_check_timeout_sec=1)
        with pytest.raises(ServerError, match="warm-up"):
            await run(server, num_warmups=1)


async def test_an_answer_that_is_no_stream_has_failed() -> None:
    with FakeServer(media_type="application/json") as server:
        result = (await run(server)).result
    assert "not a stream" in result["distinct_errors"][0]


async def test_the_model_is_the_servers_first_or_the_one_asked_for() -> None:
    with FakeServer(pages={"/version": {"version": "1.2"}}) as server:
        found = await look_up("x", server.url, BenchOptions())
        assert (found.model, found.about["version"], found.about["max_model_len"]) == ("fake", "1.2", 4096)
        assert (await look_up("x", server.url, BenchOptions(model="other"))).model == "other"
        asked = BenchOptions(model="org/fake", served_model_name="fake")
        assert (await look_up("x", server.url, asked)).about["max_model_len"] == 4096
    with FakeServer(pages={"/v1/models": {"data": []}}) as server, pytest.raises(ServerError, match="--model"):
        await look_up("x", server.url, BenchOptions())


async def test_a_tgi_server_names_its_model_itself() -> None:
    info = {"model_id": "org/m", "version": "3.0", "max_total_tokens": 99}
    with FakeServer(pages={"/v1/models": None, "/info": info}) as server:
        found = await look_up("x", server.url, BenchOptions(backend="tgi"))
    assert (found.model, found.about["version"], found.about["max_model_len"]) == ("org/m", "3.0", 99)


async def test_each_dialect_words_the_request() -> None:
    sampling: dict[str, Any] = {"top_k": 5, "extra_body": '{"priority": 1}', "logprobs": 2}
    with FakeServer(lambda body: [stop()]) as server:
        await run(server, backend="openai-chat", num_prompts=1, **sampling)
        await run(server, backend="tgi", num_prompts=1, top_k=5, temperature=0.5, model="m")
    chat, tgi = server.bodies
    assert server.paths == ["/v1/chat/completions", "/generate_stream"]
    assert (chat["max_completion_tokens"], chat["priority"], chat["top_logprobs"]) == (3, 1, 2)
    assert chat["messages"][0]["role"] == "user"
    wanted = {"max_new_tokens": 3, "details": True, "top_k": 5, "temperature": 0.5, "do_sample": True}
    assert tgi["parameters"] == wanted


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_p": 0.1}])
async def test_what_tgi_has_no_field_for_is_refused(options: dict[str, Any]) -> None:
    with FakeServer() as server, pytest.raises(ConfigError, match="TGI"):
        await run(server, backend="tgi", **options)


async def test_adapters_are_asked_for_in_turn_or_at_random() -> None:
    with FakeServer() as server:
        await run(server, lora_modules=("a", "b"), lora_assignment="round-robin", max_concurrency=1)
        assert [body["model"] for body in server.bodies] == ["a", "b"] * 3
        await run(server, lora_modules=("a", "b"))
        assert {body["model"] for body in server.bodies[6:]} <= {"a", "b"}


async def test_probes_run_beside_the_load_and_are_reported_apart() -> None:
    with FakeServer(pause=0.02) as server:
        run_ = await run(server, probe_request_rate=50.0)
    assert run_.result["completed"] == 6
    assert run_.result["probe_completed"] >= 1
    assert run_.result["probe_max_e2el_ms"] >= run_.result["probe_median_e2el_ms"] > 0
    assert "Probe Requests" in result_text(run_.result, metrics=("ttft",), percentiles=(99,))


def test_speculation_is_the_difference_of_the_servers_counters() -> None:
    def page(drafts: int, drafted: int, accepted: int, first: int, second: int) -> dict[str, float]:
        name = "vllm:spec_decode_num_"
        by_position = "\n".join(
            f'{name}accepted_tokens_per_pos_total{{engine="0",position="{place}"}} {value}.0'
            for place, value in enumerate((first, second))
        )
        return counters(
            f'# HELP x\n{name}drafts_total{{engine="0"}} {drafts}\n{name}draft_tokens_total {drafted}\n'
            f"{name}accepted_tokens_total {accepted}\n{by_position}\nvllm:other_total 5\n"
        )

    found = speculation(page(10, 20, 5, 4, 1), page(30, 60, 29, 18, 11))
    assert found is not None
    assert (found["num_drafts"], found["draft_tokens"], found["accepted_tokens"]) == (20, 40, 24)
    assert (found["acceptance_rate"], found["acceptance_length"]) == (pytest.approx(60), pytest.approx(2.2))
    assert found["per_position_acceptance_rates"] == pytest.approx([0.7, 0.5])
    assert speculation(page(10, 20, 5, 4, 1), page(10, 20, 5, 4, 1)) is None
    assert speculation({}, counters("nothing 1\n")) is None


async def test_the_text_is_vllms_block() -> None:
    with FakeServer() as server:
        options: dict[str, Any] = {"max_concurrency": 3, "request_rate": 500.0, "goodput": ("ttft:60000",)}
        options["metric_percentiles"] = "50,99.9"
        result = (await run(server, **options)).result
    text = result_text(result, metrics=("ttft", "itl"), percentiles=(50, 99.9)).splitlines()
    assert text[0] == "============ Serving Benchmark Result ============"
    assert text[1] == "Successful requests:                     6"
    assert text[3] == "Maximum request concurrency:             3"
    assert text[4] == "Request rate configured (RPS):           500.00"
    assert "---------------Time to First Token----------------" in text
    assert any(line.startswith("P99.9 ITL (ms):") for line in text)
    assert any(line.startswith("Request goodput (req/s):") for line in text)
    assert any(line.startswith("CPU per output token (us):") for line in text)
    assert text[-1] == "=" * 50


async def test_answers_are_read_after_the_run_unless_they_are_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def script(body: Mapping[str, Any]) -> list[bytes]:
        order.append("asked")
        return letters(body)

    def take(number: int, exchange: Exchange, queued: float) -> None:
        order.append("read")

    with FakeServer(script) as server:
        async with Client(Target.of(server.url)) as client:
            shots = [Shot(b'{"max_tokens": 2}')] * 3
            await drive(client, "/", shots, take=take, max_concurrency=1)
            assert order == ["asked"] * 3 + ["read"] * 3
            order.clear()
            monkeypatch.setattr("octavo.benchmarking.load._MOST_UNREAD_BYTES", 1)
            counts = Counts()
            await drive(client, "/", shots, take=take, max_concurrency=1, counts=counts)
    assert order == ["asked", "read"] * 3
    assert (counts.total, counts.done, counts.failed, counts.running) == (3, 3, 0, 0)


async def test_requests_are_sent_no_earlier_than_they_are_due() -> None:
    with FakeServer() as server:
        async with Client(Target.of(server.url)) as client:
            sent: dict[int, float] = {}

            def take(number: int, exchange: Exchange, queued: float) -> None:
                sent[number] = exchange.sent

            shots = [Shot(b"{}", due=0.05 * number) for number in range(3)]
            began = time.perf_counter()
            seconds = await drive(client, "/", shots, take=take)
    assert seconds >= 0.1
    # Later a busy machine may send them.
    assert all(sent[number] >= began + shot.due for number, shot in enumerate(shots))
