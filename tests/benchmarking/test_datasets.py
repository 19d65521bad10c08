"""Every data set gives the work it describes: lengths, common beginnings, files read or refused by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.benchmarking.datasets import Work, make_work
from octavo.benchmarking.options import BenchOptions
from octavo.benchmarking.scenarios import SCENARIOS
from octavo.benchmarking.workload import WordSource
from octavo.errors import ConfigError
from tests.benchmarking.fake_server import WordTokenizer

WORDS = WordSource(WordTokenizer())


class Syllables(WordTokenizer):
    """A token for every two letters: no word of octavo's is one token."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(text)] * ((len(text) + 1) // 2)


def make(seed: int = 0, words: WordSource = WORDS, **options: Any) -> list[Work]:
    return make_work(BenchOptions(**options).with_lengths(), words, seed=seed)


def lines(path: Path, *values: Any) -> str:
    path.write_text("\n".join(json.dumps(value) for value in values) + "\n")
    return str(path)


def test_random_prompts_have_their_length_and_differ() -> None:
    work = make(num_prompts=20, input_len=30, output_len=5)
    assert {(one.input_tokens, one.output_tokens, len(one.prompt.split())) for one in work} == {(30, 5, 30)}
    assert len({one.prompt for one in work}) == 20
    assert work == make(num_prompts=20, input_len=30, output_len=5)
    assert work != make(1, num_prompts=20, input_len=30, output_len=5)


def test_random_lengths_spread_over_the_range_and_follow_a_prefix() -> None:
    work = make(num_prompts=200, input_len=100, output_len=10, random_range_ratio=0.5, random_prefix_len=8)
    own = [one.input_tokens - 8 for one in work]
    assert (min(own), max(own)) == (pytest.approx(50, abs=4), pytest.approx(150, abs=4))
    assert len({tuple(one.prompt.split()[:8]) for one in work}) == 1
    assert {one.output_tokens for one in work} == set(range(5, 16))


def test_lengths_hold_where_no_word_is_one_token() -> None:
    words = WordSource(Syllables())
    assert not words.exact
    for one in make(words=words, num_prompts=10, input_len=40, output_len=1):
        assert one.input_tokens == words.length(one.prompt)
        assert 30 <= one.input_tokens <= 42


def test_prefixes_are_repeated_equally_often() -> None:
    work = make(
        dataset_name="prefix_repetition",
        num_prompts=12,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=6,
    )
    begins = [tuple(one.prompt.split()[:6]) for one in work]
    assert sorted(begins.count(begin) for begin in set(begins)) == [4, 4, 4]
    assert {one.input_tokens for one in work} == {6 + 256}
    with pytest.raises(ConfigError, match="num_prompts"):
        make(dataset_name="prefix_repetition", num_prompts=2)


def test_an_agents_prompt_is_the_one_before_and_more() -> None:
    work = make(dataset_name="agents", num_prompts=6, agent_steps=3, input_len=4, output_len=2, random_prefix_len=5)
    assert [one.after for one in work] == [None, 0, 1, None, 3, 4]
    assert [one.input_tokens for one in work] == [9, 15, 21] * 2
    assert work[1].prompt.startswith(work[0].prompt + " ")
    assert work[0].prompt.split()[:5] == work[3].prompt.split()[:5]


def test_sharegpt_takes_first_turns_of_fitting_length(tmp_path: Path) -> None:
    def talk(asked: int, told: int) -> dict[str, Any]:
        turns = [{"from": "human", "value": "q " * asked}, {"from": "gpt", "value": "a " * told}]
        return {"conversations": turns}

    path = tmp_path / "talks.json"
    path.write_text(json.dumps([talk(5, 6), talk(3, 9), talk(9, 3), talk(1025, 9), talk(1000, 1049), talk(7, 8), {}]))
    options: dict[str, Any] = {"dataset_name": "sharegpt", "dataset_path": str(path), "no_oversample": True}
    assert sorted((one.input_tokens, one.output_tokens) for one in make(**options)) == [(5, 6), (7, 8)]
    assert {one.output_tokens for one in make(**options, output_len=32)} == {32}
    assert len(make(**options | {"no_oversample": False, "num_prompts": 9})) == 9


def test_custom_lines_bring_prompts_and_lengths(tmp_path: Path) -> None:
    path = lines(tmp_path / "work.jsonl", {"prompt": "a b c", "output_tokens": 7}, {"task_id": 1, "prompt": "d"})
    options: dict[str, Any] = {"dataset_name": "custom", "dataset_path": path, "no_oversample": True}
    assert sorted((one.input_tokens, one.output_tokens) for one in make(**options)) == [(1, 256), (3, 256)]
    with pytest.raises(ConfigError, match="line 2"):
        make(**options, custom_output_len=-1)


def test_custom_messages_are_for_chats(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    path = lines(tmp_path / "work.jsonl", {"messages": messages, "extra_body": {"top_k": 3}})
    options: dict[str, Any] = {"dataset_name": "custom", "dataset_path": path, "num_prompts": 1}
    (one,) = make(**options, backend="openai-chat")
    assert (one.messages, one.input_tokens, one.extra_body) == (messages, 3, {"top_k": 3})
    with pytest.raises(ConfigError, match='"prompt"'):
        make(**options)


def test_a_trace_has_times_and_common_beginnings(tmp_path: Path) -> None:
    def line(at: float, length: int, ids: list[int]) -> dict[str, Any]:
        return {"timestamp": at, "input_length": length, "output_length": 2, "hash_ids": ids}

    path = lines(tmp_path / "trace.jsonl", line(100, 10, [1, 2]), line(350, 12, [1, 3]), line(350, 3, []))
    options: dict[str, Any] = {"dataset_name": "timed_trace", "dataset_path": path, "timed_trace_chunk_hash_size": 4}
    first, second, third = make(**options, timed_trace_sec_multiplier=0.001)
    assert [one.at for one in (first, second, third)] == pytest.approx([0, 0.25, 0.25])
    assert [one.input_tokens for one in (first, second, third)] == [10, 12, 3]
    assert first.prompt.split()[:4] == second.prompt.split()[:4]
    assert first.prompt.split()[4:8] != second.prompt.split()[4:8]


def arrival(at: float, length: int = 1) -> dict[str, Any]:
    return {"timestamp": at, "input_length": length, "output_length": 1}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([arrival(1, 0)], "line 1.*input_length"),
        ([arrival(1), arrival(-1)], "line 2.*timestamp"),
        ([arrival(5), arrival(4)], "line 2.*before"),
        ([["no object"]], "line 1.*object"),
        ([], "no usable request"),
    ],
)
def test_a_trace_that_cannot_be_is_refused_by_line(tmp_path: Path, values: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(dataset_name="timed_trace", dataset_path=lines(tmp_path / "trace.jsonl", *values))


def test_a_data_set_needs_its_file_and_a_known_name() -> None:
    with pytest.raises(ConfigError, match="dataset_path"):
        make(dataset_name="sharegpt")
    with pytest.raises(ConfigError, match="sonnet"):
        make(dataset_name="sonnet")


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_every_scenario_makes_work(name: str) -> None:
    options = BenchOptions(**SCENARIOS[name].options)
    work = make_work(options, WORDS, seed=0)
    assert len(work) == options.num_prompts
