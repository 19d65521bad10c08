"""Client-paced streams: how many tokens a client will take, and the part of an output that is due."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from octavo.frontend.detokenizer import IncrementalDetokenizer
from octavo.frontend.outputs import CompletionOutput
from octavo.server.failures import Failure, Kind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from octavo.frontend.tokenizer import Tokenizer

__all__ = ["MAX_CREDITS", "Cutter", "Pace"]

T = TypeVar("T")

MAX_CREDITS = 1 << 31  # as many tokens as no context holds


class Pace:
    """Counts the tokens a client has asked for and not got yet; without credits there is no bound.

    ``pause`` is called when the engine should stop working for the request, as nothing may be sent, ``resume`` when
    its next tokens are wanted. They are called in turn, and only as often as there is need: a client that takes up
    tokens already made does not set the engine going.
    """

    def __init__(self, pause: Callable[[], object], resume: Callable[[], object]) -> None:
        self.credits: int | None = None
        self.held = False
        self.ended = False
        self._pause = pause
        self._resume = resume
        self._stopped = False
        self._reading = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def open(self) -> bool:
        """Whether a token may be sent now."""
        return not self.held and self.credits != 0

    def add(self, tokens: int) -> None:
        """The client takes more tokens."""
        if self.credits is not None:
            self.credits = min(self.credits + tokens, MAX_CREDITS)
            self._changed()

    def hold(self) -> None:
        """The client wants nothing for now, whatever its credits."""
        self.held = True
        self._stop()

    def release(self) -> None:
        """The client wants to go on."""
        self.held = False
        self._changed()

    def spend(self, tokens: int, *, finished: bool) -> None:
        """Tokens were sent. ``finished``: the engine has no more of them to make."""
        if self.credits is not None and tokens:
            self.credits = max(0, self.credits - tokens)
            if self.credits == 0 and not finished:
                self._stop()

    def end(self) -> None:
        """The request was ended from outside: nobody has to wait for the client any more."""
        self.ended = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, patience: float, tokens: int = 1) -> None:
        """Until something may be sent (``tokens`` 0: something that is none) or the request was ended from outside.

        A Failure after ``patience`` seconds.
        """
        try:
            async with asyncio.timeout(patience):
                while not self.ended and (self.held or (tokens and self.credits == 0)):
                    self._waiter = asyncio.get_running_loop().create_future()
                    try:
                        await self._waiter
                    finally:
                        self._waiter = None
        except TimeoutError:
            message = f"The client has taken no token of this request for {patience:g} seconds."
            raise Failure(Kind.timeout, message, code="not_taken") from None

    async def read(self, outputs: AsyncIterator[T], patience: float) -> T | None:
        """The next output of the engine, None after the last one; the engine works only once there is room for it."""
        if not self.open:
            await self.wait(patience)
        if not self.ended:
            self._go_on()
        self._reading = True
        try:
            return await anext(outputs, None)
        finally:
            self._reading = False

    def _stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._pause()

    def _go_on(self) -> None:
        if self._stopped:
            self._stopped = False
            self._resume()

    def _changed(self) -> None:
        if self._reading:
            if self.open:
                self._go_on()  # it was held while tokens were waited for
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Cutter:
    """Cuts the outputs of one choice to a number of tokens; the texts of the parts join to the text of the whole.

    The text is cut where a reader of the tokens so far would be: text that the engine holds back, as it may begin a
    stop string, comes with a later part. Every output of the choice must pass through, whether it is cut or not.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens)
        self._read = 0  # characters of the tokens so far
        self._given = 0  # characters of the parts so far

    def cut(self, output: CompletionOutput, tokens: int | None) -> tuple[CompletionOutput, CompletionOutput | None]:
        """The first ``tokens`` tokens of an output (None: all) and what is left, None when nothing is."""
        whole = tokens is None or tokens >= len(output.token_ids)
        ids = output.token_ids if whole else output.token_ids[:tokens]
        self._read += sum([len(self._detokenizer.push(token)) for token in ids])
        if whole:
            self._given += len(output.text)
            return output, None
        size = min(max(0, self._read - self._given), len(output.text))
        self._given += size
        logprobs = output.logprobs
        first = CompletionOutput(
            output.index, output.text[:size], ids, None, None if logprobs is None else logprobs[:tokens]
        )
        rest = CompletionOutput(
            output.index,
            output.text[size:],
            output.token_ids[tokens:],
            None,
            None if logprobs is None else logprobs[tokens:],
            output.finish_reason,
            output.stop_reason,
        )
        return first, rest
