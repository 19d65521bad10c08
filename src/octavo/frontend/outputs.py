"""What a request gives back, in vLLM's shape: RequestOutput, its completions and their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token at one position, its rank (1 is the most likely) and its own text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request.

    ``logprobs`` holds one dictionary a token (the token taken first, then the most likely ones) when
    ``SamplingParams.logprobs`` was set, else None; ``cumulative_logprob`` is their sum, also given when ``best_of``
    made a choice. ``finish_reason`` is "stop", "length", "abort" or "error", None while the completion runs.
    ``stop_reason`` is the stop string or stop token id that ended it, None for an end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether no more tokens follow."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of ``time.monotonic``, which all processes of a machine share.

    ``scheduled_time`` is the beginning of the first step that computed something for it.
    """

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None

    def copy(self) -> RequestMetrics:
        """These times, which may change later. Every output has them, so this is written for speed."""
        return RequestMetrics(
            self.arrival_time, self.scheduled_time, self.first_token_time, self.last_token_time, self.finished_time
        )

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A request and what has been generated for it so far (or, in delta streams, since the last output).

    ``prompt_logprobs`` has one entry a prompt token, the first None, when ``SamplingParams.prompt_logprobs`` was set.
    ``num_cached_tokens`` counts the prompt tokens taken from the prefix cache. ``error`` says why a completion ended
    with finish reason "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = field(default=None)
