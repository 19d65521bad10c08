"""The events of a stream, made cheaply: what is the same in every event is encoded once, and only the text anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from octavo.server.openai.errors import DONE
from octavo.server.openai.usage import usage_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.frontend.outputs import CompletionOutput, Logprob
    from octavo.server.openai.usage import Usage

__all__ = ["DONE", "Chunks", "Delta", "Pending", "Progress"]

_encode = msgspec.json.Encoder().encode
_END = b"}\n\n"
_PLAIN = b',"logprobs":null,"finish_reason":null}]}\n\n'


class Chunks:
    """Writes the events of one stream.

    ``before`` and ``after`` stand around the text of a choice: those of chat make it a delta.
    """

    def __init__(
        self, id_: str, object_: str, created: int, model: str, *, before: bytes, after: bytes, fingerprint: str
    ) -> None:
        common = _encode({"id": id_, "object": object_, "created": created, "model": model})
        self._start = b"data: " + common[:-1] + b',"choices":['
        self._before = before
        self._after = after
        self._tail = after + _PLAIN
        self._heads: list[bytes] = []
        self._fingerprint = b',"system_fingerprint":' + _encode(fingerprint)

    @classmethod
    def chat(cls, id_: str, created: int, model: str, fingerprint: str) -> Chunks:
        """For ``/v1/chat/completions``."""
        return cls(
            id_, "chat.completion.chunk", created, model,
            before=b'"delta":{"content":', after=b"}", fingerprint=fingerprint,
        )  # fmt: skip

    @classmethod
    def completions(cls, id_: str, created: int, model: str, fingerprint: str) -> Chunks:
        """For ``/v1/completions``."""
        return cls(id_, "text_completion", created, model, before=b'"text":', after=b"", fingerprint=fingerprint)

    def _head(self, index: int) -> bytes:
        heads = self._heads
        while index >= len(heads):
            heads.append(b'%b{"index":%d,%b' % (self._start, len(heads), self._before))
        return heads[index]

    def text(self, index: int, text: str) -> bytes:
        """The event with nothing but more text."""
        try:
            head = self._heads[index]
        except IndexError:
            head = self._head(index)
        return b"".join((head, _encode(text), self._tail))

    def role(self, index: int, role: str, usage: Usage | None, extras: dict[str, Any]) -> bytes:
        """The first event of a choice of chat; ``extras`` stand beside the choices."""
        start = b'%b{"index":%d,"delta":{"role":%b,"content":""},"logprobs":null,"finish_reason":null}]'
        parts = [start % (self._start, index, _encode(role))]
        if usage is not None:
            parts.append(b',"usage":' + _encode(usage))
        parts.extend([b',"%b":%b' % (name.encode(), _encode(value)) for name, value in extras.items()])
        parts.append(_END)
        return b"".join(parts)

    def choice(
        self,
        index: int,
        text: str,
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        extras: dict[str, Any] | None = None,
        usage: Usage | None = None,
        last: bool = False,
    ) -> bytes:
        """Any event of a choice; ``extras`` stand in the choice. ``last`` marks the last one of the stream."""
        parts = [
            self._head(index),
            _encode(text),
            self._after,
            b',"logprobs":',
            _encode(logprobs),
            b',"finish_reason":',
            _encode(finish_reason),
        ]
        if finish_reason is not None:
            parts.append(b',"stop_reason":' + _encode(stop_reason))
        if extras:
            parts.extend([b',"%b":%b' % (name.encode(), _encode(value)) for name, value in extras.items()])
        parts.append(b"}]")
        if usage is not None:
            parts.append(b',"usage":' + _encode(usage))
        if last:
            parts.append(self._fingerprint)
        parts.append(_END)
        return b"".join(parts)

    def usage(self, usage: Usage) -> bytes:
        """The event before the end that tells the numbers of tokens, without choices."""
        return b"".join((self._start, b'],"usage":', _encode(usage), self._fingerprint, _END))


class Delta:
    """What a choice has produced since its last event."""

    __slots__ = ("finish_reason", "logprobs", "stop_reason", "text", "token_ids")

    def __init__(self, output: CompletionOutput) -> None:
        self.text = output.text
        self.token_ids: Sequence[int] = output.token_ids
        self.logprobs: Sequence[dict[int, Logprob]] | None = output.logprobs
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason

    def add(self, later: Delta) -> None:
        """Take in what came after it."""
        self.text += later.text
        self.token_ids = [*self.token_ids, *later.token_ids]
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class Pending:
    """Gathers tokens until there are enough for an event (``stream_interval``); the first and the last wait for none.

    One a choice.
    """

    __slots__ = ("_held", "_interval", "_started")

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._started = False
        self._held: Delta | None = None

    def take(self, output: CompletionOutput) -> Delta | None:
        """What is to be sent now, None while it is too little."""
        delta = Delta(output)
        if self._held is not None:
            self._held.add(delta)
            delta, self._held = self._held, None
        if self._started and delta.finish_reason is None and len(delta.token_ids) < self._interval:
            self._held = delta
            return None
        self._started = True
        return delta


class Progress:
    """How far a stream is: the tokens of each choice, and the usage to tell.

    ``cached`` counts the tokens of the prompts that came from the prefix cache.
    """

    def __init__(self, prompt_tokens: Sequence[int], choices: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._per_prompt = choices
        self.tokens = [0] * (len(prompt_tokens) * choices)
        self.running = len(self.tokens)
        self.cached = [0] * len(prompt_tokens)

    def advance(self, choice: int, output: CompletionOutput) -> None:
        """Count what a choice has produced."""
        self.tokens[choice] += len(output.token_ids)
        if output.finish_reason is not None:
            self.running -= 1

    def of_choice(self, choice: int) -> Usage:
        """The usage of one choice so far."""
        return usage_of(self._prompt_tokens[choice // self._per_prompt], self.tokens[choice])

    def total(self) -> Usage:
        """The usage of the whole request."""
        return usage_of(sum(self._prompt_tokens), sum(self.tokens), sum(self.cached))
