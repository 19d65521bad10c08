"""Turns the engine's tokens into request outputs: text, stop strings, log-probabilities and the choice of best_of.

While the engine waits, as little as possible is done for each token: text and log-probability dictionaries are made
when somebody looks at them. Only a request with stop strings has its text read as it is generated.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from octavo.engine.request import ProducedSequence
from octavo.frontend.detokenizer import IncrementalDetokenizer, StopStringScanner
from octavo.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.backends.interface import SampledToken
    from octavo.engine.request import FinishReason, SequenceOutput
    from octavo.frontend.tokenizer import Tokenizer
    from octavo.sampling.params import SamplingParams

__all__ = ["OutputKind", "OutputProcessor", "Processed", "RequestState", "TokenTexts"]

OutputKind = Literal["cumulative", "delta", "final"]

_TOKEN_TEXTS = 65536  # single tokens whose text is remembered: a bound on memory, above what most vocabularies use


class TokenTexts:
    """The text of single tokens, remembered: log-probabilities name the same few thousand tokens again and again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            if len(self._texts) >= _TOKEN_TEXTS:
                self._texts.clear()
            text = self._texts[token] = self._tokenizer.decode([token], skip_special_tokens=False, continues=True)
        return text

    def logprobs(self, sample: SampledToken) -> dict[int, Logprob]:
        """The dictionary of one position: the token taken first, then the most likely ones in order."""
        token = sample.token
        found = {token: Logprob(sample.logprob, sample.rank, self(token))}
        for rank, (other, logprob) in enumerate(sample.top, 1):
            if other != token:
                found[other] = Logprob(logprob, rank, self(other))
        return found


class _Sequence:
    """One sequence of a request: its tokens, and its text and log-probabilities as far as they have been read."""

    __slots__ = (
        "_closed",
        "_decoded",
        "_detokenizer",
        "_include_stop",
        "_scanner",
        "_sent_end",
        "_sent_text",
        "_sent_tokens",
        "_text",
        "cumulative",
        "finish_reason",
        "index",
        "last_time",
        "logprobs",
        "min_tokens",
        "samples",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.samples: list[SampledToken] | None = None if params.logprobs is None else []
        self.logprobs: list[dict[int, Logprob]] = []
        self.cumulative = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.min_tokens = params.min_tokens
        self.last_time: float | None = None  # when the last token came, in seconds of time.monotonic
        self._include_stop = params.include_stop_str_in_output
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        stops = params.stop_strings
        self._scanner = StopStringScanner(stops, params.include_stop_str_in_output) if stops else None
        self._text = ""
        self._decoded = 0
        self._closed = False
        self._sent_tokens = 0
        self._sent_text = 0
        self._sent_end = False

    def advance(self, samples: Sequence[SampledToken], reason: str | None, stop_reason: int | str | None) -> bool:
        """Take the tokens of a step; true when a stop string in their text ends the sequence."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        if self._scanner is None:
            ids = self.token_ids
            for sample in samples:
                ids.append(sample.token)
                self.cumulative += sample.logprob
            if self.samples is not None:
                self.samples.extend(samples)
            return False
        end = len(samples)
        if reason == "stop" and not self._include_stop:
            end -= 1  # the stop token's own text is not part of the answer, so it cannot complete a stop string
        for position, sample in enumerate(samples):
            self.token_ids.append(sample.token)
            self.cumulative += sample.logprob
            if self.samples is not None:
                self.samples.append(sample)
            if position < end:
                self._decoded += 1
                if self._scan(self._detokenizer.push(sample.token)):
                    return True
        if reason is not None:
            self._close()
        return False

    def _scan(self, delta: str) -> bool:
        """Add text, looking for stop strings, of which none may end within the first ``min_tokens`` tokens."""
        assert self._scanner is not None
        safe, matched = self._scanner.feed(delta, len(self.token_ids) > self.min_tokens)
        self._text += safe
        if matched is None:
            return False
        self.finish_reason, self.stop_reason = "stop", matched
        self._closed = True
        return True

    def _close(self) -> None:
        """Add the text that was held back in case more would come."""
        rest = self._detokenizer.finish()
        if self._scanner is None:
            self._text += rest
        elif not self._scan(rest):
            self._text += self._scanner.flush()
        self._closed = True

    def text(self) -> str:
        """The text so far: never half a character, nor what may turn out to begin a stop string."""
        if self._closed:
            return self._text
        if self._scanner is None:
            end = len(self.token_ids)
            if self.finish_reason == "stop" and not self._include_stop:
                end -= 1
            if self._decoded < end:
                push = self._detokenizer.push
                if self._decoded + 1 == end:
                    self._text += push(self.token_ids[self._decoded])
                else:
                    self._text += "".join([push(token) for token in self.token_ids[self._decoded : end]])
                self._decoded = end
        if self.finish_reason is not None:
            self._close()
        return self._text

    def completion(self, texts: TokenTexts, index: int, delta: bool, cumulative: bool) -> CompletionOutput:
        """What a caller sees of this sequence now; in delta form, what it has not seen yet."""
        text = self.text()
        token_ids = self.token_ids
        logprobs: list[dict[int, Logprob]] | None = None
        if self.samples is not None:
            known = self.logprobs
            known.extend([texts.logprobs(sample) for sample in self.samples])
            self.samples.clear()
            logprobs = known[self._sent_tokens :] if delta else known.copy()
        if delta:
            token_ids, self._sent_tokens = token_ids[self._sent_tokens :], len(token_ids)
            text, self._sent_text = text[self._sent_text :], len(text)
            self._sent_end = self.finish_reason is not None
        else:
            token_ids = token_ids.copy()
        return CompletionOutput(
            index,
            text,
            token_ids,
            self.cumulative if cumulative else None,
            logprobs,
            self.finish_reason,
            self.stop_reason,
        )

    @property
    def unseen(self) -> bool:
        return self._sent_tokens < len(self.token_ids) or (self.finish_reason is not None and not self._sent_end)


class RequestState:
    """A request in the engine, as the front end knows it. Written by the engine's thread, read by the caller's."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        seed: int,
        arrival: float,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_ids = prompt_ids
        self.params = params
        self.seed = seed
        self.lock = threading.Lock()
        count = params.num_sequences
        self.sequences = [_Sequence(index, params, tokenizer, prompt_ids) for index in range(count)]
        self.metrics = RequestMetrics(arrival)
        self.running = count
        self.num_cached_tokens = 0
        self.error: str | None = None
        self.prompt_samples: list[SampledToken | None] | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._chooses = count > params.n
        self._has_cumulative = self._chooses or params.logprobs is not None

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return self.running == 0

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far in all sequences."""
        sequences = self.sequences
        if len(sequences) == 1:
            return len(sequences[0].token_ids)
        return sum([len(sequence.token_ids) for sequence in sequences])

    @property
    def finish_reasons(self) -> list[str | None]:
        """How each sequence ended, None while it runs."""
        return [sequence.finish_reason for sequence in self.sequences]

    def produced(self) -> list[ProducedSequence]:
        """What an engine that takes the request over has to know of its sequences."""
        return [
            ProducedSequence(sequence.token_ids.copy(), sequence.finish_reason is not None)
            for sequence in self.sequences
        ]

    def end(self, reason: str, error: str | None = None) -> None:
        """End what still runs, such as when the request is aborted."""
        with self.lock:
            self._end(reason, error)

    def _end(self, reason: str, error: str | None) -> None:
        if error is not None:
            self.error = error
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = reason
        self.running = 0
        self.metrics.finished_time = time.monotonic()

    def output(self, texts: TokenTexts, kind: OutputKind = "final") -> RequestOutput | None:
        """The output to hand over now, None when there is nothing to say yet.

        With ``best_of`` above ``n`` the choice is made at the end, so only a finished request has an output: the ``n``
        sequences with the highest cumulative log-probability (as vLLM; ties go to the lower index), best first,
        numbered from 0.
        """
        with self.lock:
            finished = self.running == 0
            if not finished and (self._chooses or kind == "final"):
                return None
            delta = kind == "delta" and not self._chooses
            if self._chooses:
                ranked = sorted(self.sequences, key=lambda sequence: -sequence.cumulative)[: self.params.n]
                chosen = list(enumerate(ranked))
            else:
                chosen = [(sequence.index, sequence) for sequence in self.sequences if not delta or sequence.unseen]
                if not chosen:
                    return None
            outputs = [sequence.completion(texts, index, delta, self._has_cumulative) for index, sequence in chosen]
            if self.prompt_samples is not None:
                self.prompt_logprobs = [
                    None if sample is None else texts.logprobs(sample) for sample in self.prompt_samples
                ]
                self.prompt_samples = None
            prompt_logprobs = self.prompt_logprobs
            if delta:
                self.prompt_logprobs = None
            return RequestOutput(
                self.request_id,
                self.prompt,
                self.prompt_ids,
                prompt_logprobs,
                outputs,
                finished,
                self.num_cached_tokens,
                self.metrics.copy(),
                self.error,
            )


@dataclass(slots=True)
class Processed:
    """What one engine step did to the requests."""

    changed: list[RequestState] = field(default_factory=list)
    finished: list[RequestState] = field(default_factory=list)
    # (request id, sequence, reason) of sequences that ended here while the engine still runs them.
    stops: list[tuple[str, int, FinishReason]] = field(default_factory=list)
    first_tokens: list[RequestState] = field(default_factory=list)  # requests that got their first token
    intervals: list[float] = field(default_factory=list)  # seconds between a token and the one before, each sequence
    num_prompt_tokens: int = 0  # of the requests that got their first token
    num_tokens: int = 0


class OutputProcessor:
    """Keeps the requests that are in the engine and gives them the tokens of each step."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.texts = TokenTexts(tokenizer)
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def add(self, state: RequestState) -> None:
        """Follow a request from now on."""
        self._states[state.request_id] = state

    def remove(self, request_id: str) -> RequestState | None:
        """Forget a request, such as when it was aborted."""
        return self._states.pop(request_id, None)

    def states(self) -> list[RequestState]:
        """Every request that has not finished."""
        return list(self._states.values())

    def process(self, outputs: Iterable[SequenceOutput]) -> Processed:
        """Take the outputs of one engine step."""
        result = Processed()
        states = self._states
        now = time.monotonic()
        tokens = 0
        for output in outputs:
            state = states.get(output.request_id)
            if state is None:
                continue  # finished or aborted here in the same step
            with state.lock:
                sequence = state.sequences[output.index]
                if output.num_cached_tokens:
                    state.num_cached_tokens = output.num_cached_tokens
                if output.prompt_logprobs is not None:
                    state.prompt_samples = list(output.prompt_logprobs)
                if sequence.finish_reason is not None:
                    continue
                samples = output.new_tokens
                if samples:
                    tokens += len(samples)
                    metrics = state.metrics
                    if metrics.first_token_time is None:
                        metrics.first_token_time = now
                        result.num_prompt_tokens += len(state.prompt_ids)
                        result.first_tokens.append(state)
                    metrics.last_token_time = now
                    if sequence.last_time is not None:
                        result.intervals.append(now - sequence.last_time)
                    sequence.last_time = now
                stopped = sequence.advance(samples, output.finish_reason, output.stop_reason)
                if stopped and not output.finished:
                    result.stops.append((state.request_id, sequence.index, "stop"))
                if sequence.finish_reason is not None:
                    state.running -= 1
                    if output.error is not None:
                        # What made this sequence fail is in the weights or the prompt: its siblings would fail too.
                        result.stops.extend(
                            (state.request_id, other.index, "error")
                            for other in state.sequences
                            if other.finish_reason is None
                        )
                        state._end("error", output.error)
                    if state.running == 0:
                        state.metrics.finished_time = now
                        del states[state.request_id]
                        result.finished.append(state)
            result.changed.append(state)
        result.num_tokens = tokens
        return result
