"""What the engine generated, in the words of Text Generation Inference: tokens, details, events, headers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from octavo.frontend.detokenizer import IncrementalDetokenizer
from octavo.server.failures import Failure, Kind
from octavo.server.sse import data_event
from octavo.server.tgi.schemas import (
    BestOfSequence,
    Details,
    FinishReason,
    GenerateResponse,
    PrefillToken,
    StreamDetails,
    StreamResponse,
    Token,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from octavo.frontend.tokenizer import Tokenizer
    from octavo.server.tgi.validation import Asked

__all__ = [
    "COMPUTE_TYPE",
    "EventWriter",
    "Generated",
    "TokenWriter",
    "answer",
    "best_first",
    "compute_headers",
    "finish_reason",
    "timing_headers",
]

COMPUTE_TYPE = "cpu+optimized"


def finish_reason(completion: CompletionOutput, num_tokens: int, max_new_tokens: int) -> FinishReason:
    """Why a sequence of ``num_tokens`` ended. TGI looks at the length first, then for an end token, then at texts."""
    reason = completion.finish_reason
    if reason not in ("length", "stop"):
        raise Failure(Kind.internal, f"the generation ended with {reason}", code="aborted")
    if reason == "length" or num_tokens >= max_new_tokens:
        return "length"
    return "stop_sequence" if isinstance(completion.stop_reason, str) else "eos_token"


class TokenWriter:
    """The tokens of one sequence as TGI lists them, in the order they come.

    The texts of the tokens that are not special add up to the generated text: half a character is given with the token
    that completes it, and the last token loses what follows a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], top_n: int) -> None:
        self._special = tokenizer.special_ids
        self._push = IncrementalDetokenizer(tokenizer, prompt_ids).push
        self._top_n = top_n
        self._length = 0

    def write(
        self, token_id: int, logprobs: dict[int, Logprob], full_text: str | None
    ) -> tuple[Token, list[Token] | UnsetType]:
        """One token and, where asked for, the most likely ones at its place; ``full_text`` comes with the last."""
        own = logprobs[token_id]
        special = token_id in self._special
        if special:
            text = own.decoded_token or ""
        elif full_text is None:
            text = self._push(token_id)
            self._length += len(text)
        else:
            text = full_text[self._length :]
        token = Token(token_id, text, _finite(own.logprob), special)
        return token, self._top(logprobs) if self._top_n else UNSET

    def _top(self, logprobs: dict[int, Logprob]) -> list[Token]:
        """The most likely tokens, likeliest first; those that could not be drawn are left out."""
        found = [
            (entry.rank or 0, Token(token_id, entry.decoded_token or "", entry.logprob, token_id in self._special))
            for token_id, entry in logprobs.items()
            if (entry.rank or 0) <= self._top_n and math.isfinite(entry.logprob)
        ]
        found.sort(key=lambda pair: pair[0])
        return [token for _, token in found]


def _finite(logprob: float) -> float | None:
    return logprob if math.isfinite(logprob) else None


class EventWriter:
    """The events of a stream, one for each token."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer, prompt_ids: Sequence[int], max_new: int, seed: int | None):
        self._asked = asked
        self._tokens = TokenWriter(tokenizer, prompt_ids, asked.top_n)
        self._max_new = max_new
        self._seed = seed
        self._input_length = len(prompt_ids)
        self._texts: list[str] = []
        self._count = 0
        self.ended = False  # whether the last event was made

    def events(self, completion: CompletionOutput) -> bytes:
        """The events for what is new in a delta; nothing when it has no token."""
        self._texts.append(completion.text)
        logprobs = completion.logprobs
        assert logprobs is not None
        last = len(completion.token_ids) - 1
        frames = []
        for place, (token_id, entry) in enumerate(zip(completion.token_ids, logprobs, strict=True)):
            self._count += 1
            if place == last and completion.finish_reason is not None:
                frames.append(self._last(token_id, entry, completion))
            else:
                token, top = self._tokens.write(token_id, entry, None)
                frames.append(data_event(StreamResponse(self._count, token, top)))
        return b"".join(frames) if len(frames) != 1 else frames[0]

    def _last(self, token_id: int, entry: dict[int, Logprob], completion: CompletionOutput) -> bytes:
        reason = finish_reason(completion, self._count, self._max_new)
        text = "".join(self._texts)
        token, top = self._tokens.write(token_id, entry, text)
        details = None
        if self._asked.details:
            details = StreamDetails(
                finish_reason=reason,
                generated_tokens=self._count,
                seed=self._seed,
                input_length=self._input_length,
            )
        if self._asked.return_full_text:
            text = self._asked.inputs + text
        self.ended = True
        return data_event(StreamResponse(self._count, token, top, text, details))


class Generated:
    """One finished sequence; ``seed`` is what it was drawn with, None for a greedy one."""

    def __init__(self, output: RequestOutput, max_new: int, seed: int | None) -> None:
        self.output = output
        (self.completion,) = output.outputs
        self.num_tokens = len(self.completion.token_ids)
        self.reason = finish_reason(self.completion, self.num_tokens, max_new)
        self.seed = seed

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens, which must have been asked for."""
        entries = self.completion.logprobs
        assert entries is not None
        total = sum([entry[token].logprob for token, entry in zip(self.completion.token_ids, entries, strict=True)])
        return total / max(1, self.num_tokens)

    def text(self, asked: Asked) -> str:
        """The generated text, after the prompt when that was asked for."""
        return asked.inputs + self.completion.text if asked.return_full_text else self.completion.text

    def prefill(self, tokenizer: Tokenizer) -> list[PrefillToken]:
        """The tokens of the prompt; empty unless their log-probabilities were asked for."""
        entries = self.output.prompt_logprobs
        if entries is None:
            return []
        tokens = []
        for token_id, entry in zip(self.output.prompt_token_ids, entries, strict=True):
            if entry is None:  # nothing comes before the first one
                text = tokenizer.decode([token_id], skip_special_tokens=False, continues=True)
                tokens.append(PrefillToken(token_id, text, None))
            else:
                own = entry[token_id]
                tokens.append(PrefillToken(token_id, own.decoded_token or "", _finite(own.logprob)))
        return tokens

    def tokens(self, asked: Asked, tokenizer: Tokenizer) -> tuple[list[Token], list[list[Token]] | UnsetType]:
        """The generated tokens and, where asked for, the most likely ones at each place."""
        writer = TokenWriter(tokenizer, self.output.prompt_token_ids, asked.top_n)
        entries = self.completion.logprobs
        assert entries is not None
        tokens, tops = [], []
        for place, (token_id, entry) in enumerate(zip(self.completion.token_ids, entries, strict=True), 1):
            token, top = writer.write(token_id, entry, self.completion.text if place == self.num_tokens else None)
            tokens.append(token)
            if top is not UNSET:
                tops.append(top)
        return tokens, tops or UNSET


def best_first(sequences: list[Generated]) -> list[Generated]:
    """The sequence with the highest mean log-probability a token first, the others in their order."""
    best = max(sequences, key=lambda sequence: sequence.mean_logprob)
    return [best, *[sequence for sequence in sequences if sequence is not best]]


def answer(asked: Asked, sequences: list[Generated], tokenizer: Tokenizer) -> GenerateResponse:
    """The answer of ``/generate``: the first sequence, the others only in its details."""
    best = sequences[0]
    if not asked.details:
        return GenerateResponse(best.text(asked))
    others: list[BestOfSequence] | UnsetType = UNSET
    if asked.best_of > 1:
        others = []
        for other in sequences[1:]:
            tokens, tops = other.tokens(asked, tokenizer)
            others.append(
                BestOfSequence(
                    generated_text=other.text(asked),
                    finish_reason=other.reason,
                    generated_tokens=other.num_tokens,
                    seed=other.seed,
                    prefill=other.prefill(tokenizer),
                    tokens=tokens,
                    top_tokens=tops,
                )
            )
    tokens, tops = best.tokens(asked, tokenizer)
    details = Details(
        finish_reason=best.reason,
        generated_tokens=best.num_tokens,
        seed=best.seed,
        prefill=best.prefill(tokenizer),
        tokens=tokens,
        best_of_sequences=others,
        top_tokens=tops,
    )
    return GenerateResponse(best.text(asked), details)


def compute_headers(asked: Asked) -> dict[str, str]:
    """The headers every generation is answered with."""
    return {"x-compute-type": COMPUTE_TYPE, "x-compute-characters": str(len(asked.inputs))}


def timing_headers(
    asked: Asked, generated: Generated, metrics: RequestMetrics, *, arrival: float, now: float
) -> dict[str, str]:
    """Where the time of a request went, from its ``arrival`` at the server: milliseconds, x-compute-time in seconds."""
    started = metrics.arrival_time if metrics.scheduled_time is None else metrics.scheduled_time
    inference = now - started
    return {
        **compute_headers(asked),
        "x-compute-time": f"{now - arrival:.6f}",
        "x-total-time": _milliseconds(now - arrival),
        "x-validation-time": _milliseconds(metrics.arrival_time - arrival),
        "x-queue-time": _milliseconds(started - metrics.arrival_time),
        "x-inference-time": _milliseconds(inference),
        "x-time-per-token": _milliseconds(inference / max(1, generated.num_tokens)),
        "x-prompt-tokens": str(len(generated.output.prompt_token_ids)),
        "x-generated-tokens": str(generated.num_tokens),
    }


def _milliseconds(seconds: float) -> str:
    return str(max(0, int(seconds * 1000)))
