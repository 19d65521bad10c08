"""The work a server is given: data sets by name, each a list of prompts with the lengths of prompt and answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.benchmarking.options import BenchOptions
from octavo.benchmarking.workload import WordSource
from octavo.errors import ConfigError

__all__ = ["DATASETS", "Work", "make_work"]

# What vLLM's bench leaves out of ShareGPT: turns too short to mean anything or too long for the servers of its day.
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048


@dataclass(frozen=True, slots=True)
class Work:
    """One request to send.

    ``messages`` are sent in place of ``prompt`` where the dialect is chat. ``at`` is when it arrives, in seconds after
    the first (a trace); ``after`` is the number of the request whose answer it waits for (the next step of an agent).
    """

    prompt: str
    input_tokens: int
    output_tokens: int
    messages: Sequence[Mapping[str, Any]] = ()
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    at: float | None = None
    after: int | None = None


def make_work(options: BenchOptions, words: WordSource, *, seed: int) -> list[Work]:
    """The requests of the data set that ``options`` name; equal seeds give equal work."""
    if options.dataset_name not in DATASETS:
        raise ConfigError(f"dataset_name must be one of {', '.join(DATASETS)}, got {options.dataset_name!r}")
    work = DATASETS[options.dataset_name](options, words, seed)
    if not work:
        raise ConfigError(f"data set {options.dataset_name!r} has no usable request")
    if len(work) < options.num_prompts and not options.no_oversample and options.dataset_name in _FROM_FILES:
        numbers = random.Random(f"oversample {seed}")
        work = work + numbers.choices(work, k=options.num_prompts - len(work))
    return work


# --- made of random words ---------------------------------------------------------------------------------------------


def _random(options: BenchOptions, words: WordSource, seed: int) -> list[Work]:
    """Lengths spread evenly over (1 - ratio) to (1 + ratio) times the length asked for, after a common prefix."""
    numbers = random.Random(f"random {seed}")
    prefix = words.words(options.random_prefix_len, random.Random(f"prefix {seed}"))
    work = []
    for _ in range(options.num_prompts):
        own = _spread(options.random_input_len, options.random_range_ratio, numbers)
        output = _spread(options.random_output_len, options.random_range_ratio, numbers)
        work.append(_of_words(words, prefix + words.words(own, numbers), output))
    return work


def _prefix_repetition(options: BenchOptions, words: WordSource, seed: int) -> list[Work]:
    """Equal numbers of requests for each of several prefixes, in random order, each with a suffix of its own."""
    count = options.prefix_repetition_num_prefixes
    each = options.num_prompts // count
    if each == 0:
        raise ConfigError(
            f"num_prompts must be at least prefix_repetition_num_prefixes ({count}), got {options.num_prompts}"
        )
    numbers = random.Random(f"prefix_repetition {seed}")
    work = []
    for _ in range(count):
        prefix = words.words(options.prefix_repetition_prefix_len, numbers)
        for _ in range(each):
            suffix = words.words(options.prefix_repetition_suffix_len, numbers)
            work.append(_of_words(words, prefix + suffix, options.prefix_repetition_output_len))
    if not options.disable_shuffle:
        numbers.shuffle(work)
    return work


def _agents(options: BenchOptions, words: WordSource, seed: int) -> list[Work]:
    """Agents that call the model step by step: each prompt is the one before, its answer and a tool's result.

    All agents share their instructions. What stands for the answers is random too, so that servers get equal work.
    """
    steps = options.agent_steps
    instructions = words.words(options.random_prefix_len, random.Random(f"instructions {seed}"))
    work: list[Work] = []
    for number in range(max(1, options.num_prompts // steps)):
        numbers = random.Random(f"agent {seed}/{number}")
        history = instructions + words.words(options.random_input_len, numbers)
        for step in range(steps):
            work.append(
                replace(_of_words(words, history, options.random_output_len), after=len(work) - 1 if step else None)
            )
            history = history + words.words(options.random_output_len + options.random_input_len, numbers)
    return work


def _spread(length: int, ratio: float, numbers: random.Random) -> int:
    return numbers.randint(max(1, int(length * (1 - ratio))), max(1, int(length * (1 + ratio) + 1e-9)))


def _of_words(words: WordSource, chosen: Sequence[str], output: int) -> Work:
    text = " ".join(chosen)
    return Work(text, len(chosen) if words.exact else words.length(text), output)


# --- read from files --------------------------------------------------------------------------------------------------


def _sharegpt(options: BenchOptions, words: WordSource, seed: int) -> list[Work]:
    """The first question of each conversation; the first answer's length, unless one is given."""
    path = _path(options)
    try:
        conversations = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(conversations, list):
        raise ConfigError(f"{path} must hold a list of conversations")
    if not options.disable_shuffle:
        random.Random(seed).shuffle(conversations)
    work: list[Work] = []
    for conversation in conversations:
        if len(work) == options.num_prompts:
            break
        turns = conversation.get("conversations") or [] if isinstance(conversation, dict) else []
        values = [turn.get("value") for turn in turns[:2] if isinstance(turn, dict)]
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < 2:
            continue
        asked, told = words.length(texts[0]), words.length(texts[1])
        output = options.sharegpt_output_len or told
        short = asked < _SHORTEST or (options.sharegpt_output_len is None and told < _SHORTEST)
        if not short and asked <= _LONGEST_PROMPT and asked + output <= _LONGEST:
            work.append(Work(texts[0], asked, output))
    return work


def _custom(options: BenchOptions, words: WordSource, seed: int) -> list[Work]:
    """A line for each request: {"prompt": text} or {"messages": [...]}, with "output_tokens" where a line has its own.

    ``custom_output_len`` rules unless it is -1. Lines as of trtllm-bench (task_id, prompt, output_tokens) fit too.
    """
    work = []
    for number, line in _lines(_path(options)):
        own = line.get("output_tokens", line.get("output_len"))
        output = own if options.custom_output_len == -1 else options.custom_output_len
        if not isinstance(output, int) or isinstance(output, bool) or output < 1:
            raise ConfigError(
                f'line {number} of the data set: custom_output_len -1 needs a whole "output_tokens", got {own!r}'
            )
        messages = line.get("messages")
        prompt = line.get("prompt")
        extra = line.get("extra_body") or {}
        if isinstance(messages, list) and messages and options.backend == "openai-chat":
            text = "\n".join(str(message.get("content", "")) for message in messages if isinstance(message, dict))
            work.append(Work(text, words.length(text), output, messages=messages, extra_body=extra))
        elif isinstance(prompt, str) and prompt:
            work.append(Work(prompt, words.length(prompt), output, extra_body=extra))
        else:
            wanted = '"prompt" or "messages"' if options.backend == "openai-chat" else '"prompt"'
            raise ConfigError(f"line {number} of the data set has no {wanted}")
    if not options.disable_shuffle:
        random.Random(seed).shuffle(work)
    return work[: options.num_prompts]


def _timed_trace(options: BenchOptions, words: WordSource, seed: int) -> list[Work]:
    """A line for each request: timestamp, input_length, output_length and, for common beginnings, hash_ids.

    Each hash id stands for ``timed_trace_chunk_hash_size`` tokens, the same wherever it occurs; what a prompt has
    beyond its ids is its own.
    """
    size = options.timed_trace_chunk_hash_size
    work: list[Work] = []
    first: float | None = None
    last = 0.0
    for number, line in _lines(_path(options)):
        if len(work) == options.num_prompts:
            break
        length = _whole(line, "input_length", number)
        output = _whole(line, "output_length", number)
        stamp = line.get("timestamp")
        if not isinstance(stamp, (int, float)) or isinstance(stamp, bool) or stamp < 0:
            raise ConfigError(f'line {number} of the trace: "timestamp" must be a number from 0 up, got {stamp!r}')
        if stamp < last:
            raise ConfigError(f"line {number} of the trace: its timestamp {stamp:g} is before {last:g}, the last one's")
        first, last = stamp if first is None else first, float(stamp)
        chosen: list[str] = []
        for chunk in line.get("hash_ids") or ():
            if len(chosen) < length:
                chosen += words.words(size, random.Random(f"chunk {seed}/{chunk}"))
        if len(chosen) < length:
            chosen += words.words(length - len(chosen), random.Random(f"own {seed}/{number}"))
        made = _of_words(words, chosen[:length], output)
        work.append(replace(made, at=(stamp - first) * options.timed_trace_sec_multiplier))
    return work


def _whole(line: Mapping[str, Any], name: str, number: int) -> int:
    value = line.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f'line {number} of the trace: "{name}" must be a whole number from 1 up, got {value!r}')
    return value


def _path(options: BenchOptions) -> Path:
    if options.dataset_path is None:
        raise ConfigError(f"data set {options.dataset_name!r} needs dataset_path, the file to read")
    return Path(options.dataset_path)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"line {number} of {path.name} is not JSON: {error}") from error
            if not isinstance(value, dict):
                raise ConfigError(f"line {number} of {path.name} must be an object")
            yield number, value


DATASETS: dict[str, Callable[[BenchOptions, WordSource, int], list[Work]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "prefix_repetition": _prefix_repetition,
    "custom": _custom,
    "timed_trace": _timed_trace,
    "agents": _agents,
}
_FROM_FILES = ("sharegpt", "custom")
