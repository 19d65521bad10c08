"""AsyncLLM: an engine in a thread of its own, for programs whose requests come and go while others run.

The engine's thread alone touches the engine. It takes commands (add, abort) from a list guarded by a condition, on
which it also waits when there is nothing to do, and wakes the event loops of the requests a step has changed. A stream
reads the state of its request when its consumer asks for more, so however slow the consumer is, what is kept for it is
the request's own tokens and nothing else: outputs that were not read in time become one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from octavo.errors import EngineDeadError, GenerationError, OctavoError, ParameterError
from octavo.frontend.conversations import render_conversations
from octavo.frontend.input_processor import InputProcessor, Prompt, PromptText, parse_prompt
from octavo.frontend.loading import LoadedModel, load_engine
from octavo.frontend.options import DEFAULT_MODEL, EngineOptions
from octavo.frontend.output_processor import OutputKind, OutputProcessor, RequestState
from octavo.frontend.outputs import RequestOutput
from octavo.sampling.params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.core import Engine
    from octavo.engine.request import EngineRequest
    from octavo.engine.stats import EngineStats
    from octavo.frontend.tokenizer import Tokenizer

__all__ = ["AsyncLLM"]

_log = logging.getLogger(__name__)

# Texts above this many characters are tokenised in a worker thread, so that the event loop goes on serving others.
_LONG_TEXT = 20_000


class _Stream:
    """The reading end of a request: belongs to one event loop, woken by the engine's thread."""

    __slots__ = ("changed", "failure", "loop", "request", "state", "waiter")

    def __init__(self, request: EngineRequest, state: RequestState, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.state = state
        self.loop = loop
        self.changed = False
        self.failure: BaseException | None = None
        self.waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Until there is something to read. The flag is lowered before the state is read, so no change is lost."""
        while not self.changed:
            self.waiter = self.loop.create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        self.changed = False


def _wake(streams: list[_Stream]) -> None:
    """Runs in the streams' event loop."""
    for stream in streams:
        if stream.waiter is not None and not stream.waiter.done():
            stream.waiter.set_result(None)


class _EngineThread:
    """Steps the engine while there is work; holds no reference to the AsyncLLM, which can so be collected."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.outputs = OutputProcessor(loaded.tokenizer)
        self.failure: BaseException | None = None
        self._condition = threading.Condition()
        self._added: list[_Stream] = []
        self._aborted: list[_Stream] = []
        self._calls: list[tuple[Callable[[Engine], Any], Future[Any]]] = []
        self._closing = False
        self._streams: dict[str, _Stream] = {}
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    # -- called from any thread

    def add(self, stream: _Stream) -> None:
        with self._condition:
            self.check()
            if stream.state.request_id in self._streams:
                raise ParameterError("request_id", stream.state.request_id, "unlike that of any running request")
            self._streams[stream.state.request_id] = stream
            self._added.append(stream)
            self._condition.notify()

    def abort(self, request_id: str, stream: _Stream | None = None) -> bool:
        """End a request; with ``stream`` only if it is that one, not a later request of the same id."""
        with self._condition:
            running = self._streams.get(request_id)
            if running is None or (stream is not None and running is not stream):
                return False
            self._aborted.append(running)
            self._condition.notify()
            return True

    def call(self, function: Callable[[Engine], Any]) -> Future[Any]:
        """Have the engine's thread call a function between two steps."""
        future: Future[Any] = Future()
        with self._condition:
            self.check()
            self._calls.append((function, future))
            self._condition.notify()
        return future

    def running(self) -> int:
        return len(self._streams)

    def check(self) -> None:
        if self.failure is not None:
            raise _dead(self.failure)
        if self._closing:
            raise EngineDeadError("this AsyncLLM is closed: make a new one")

    def close(self) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the engine's thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            _log.exception("the engine stopped on an error")
            self.failure = error
        with self._condition:
            self._closing = True
            streams = list(self._streams.values())
            self._streams.clear()
            calls, self._calls = self._calls, []
        for _, future in calls:
            future.set_exception(_dead(self.failure))
        for stream in streams:
            # One exception each: raising the same one in several tasks would mix up their tracebacks.
            stream.failure = _dead(self.failure)
        self._notify(streams)
        self.loaded.close()

    def _turn(self) -> bool:
        """Wait for work, then do one step of it; false when the engine is to be closed."""
        engine = self.loaded.engine
        with self._condition:
            while not (self._added or self._aborted or self._calls or self._closing or engine.has_work()):
                self._condition.wait()
            if self._closing:
                return False
            added, self._added = self._added, []
            aborted, self._aborted = self._aborted, []
            calls, self._calls = self._calls, []
        changed = [stream for stream in added if not self._admit(stream)]
        changed.extend([stream for stream in aborted if self._abort(stream)])
        for function, future in calls:
            try:
                future.set_result(function(engine))
            except Exception as error:
                future.set_exception(error)
        if engine.has_work():
            processed = self.outputs.process(engine.step())
            for request_id, index, reason in processed.stops:
                engine.finish(request_id, index, reason)
            changed.extend([self._streams[state.request_id] for state in processed.changed])
            for state in processed.finished:
                self._forget(state.request_id)
        self._notify(changed)
        return True

    def _admit(self, stream: _Stream) -> bool:
        try:
            self.loaded.engine.add(stream.request)
        except OctavoError as error:  # this request's own fault, such as one that can never fit: the others go on
            stream.failure = error
            self._forget(stream.state.request_id)
            return False
        self.outputs.add(stream.state)
        return True

    def _abort(self, stream: _Stream) -> bool:
        request_id = stream.state.request_id
        if self._streams.get(request_id) is not stream:
            return False  # it ended before the command was read
        self.outputs.remove(request_id)
        self.loaded.engine.abort(request_id)
        stream.state.end("abort")
        self._forget(request_id)
        return True

    def _forget(self, request_id: str) -> None:
        with self._condition:
            self._streams.pop(request_id, None)

    def _notify(self, streams: Sequence[_Stream]) -> None:
        """Wake the consumers of these streams, each event loop once."""
        loops: dict[asyncio.AbstractEventLoop, list[_Stream]] = {}
        for stream in streams:
            if not stream.changed:
                stream.changed = True
                loops.setdefault(stream.loop, []).append(stream)
        for loop, woken in loops.items():
            try:
                loop.call_soon_threadsafe(_wake, woken)
            except RuntimeError:  # that loop is closed: nobody reads these streams any more
                for stream in woken:
                    self.abort(stream.state.request_id, stream)


class AsyncLLM:
    """Generates text for any number of concurrent requests; the keyword arguments are those of ``EngineOptions``."""

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        self.options = EngineOptions.from_kwargs(model=model, **options)
        self._start(load_engine(self.options))

    @classmethod
    def from_loaded(cls, loaded: LoadedModel) -> Self:
        """An AsyncLLM on an engine that is already loaded."""
        llm = cls.__new__(cls)
        llm.options = loaded.options
        llm._start(loaded)
        return llm

    def _start(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._inputs = InputProcessor.for_model(loaded)
        self._engine = _EngineThread(loaded)
        # Also runs at exit, before the interpreter would kill the thread in the middle of a step.
        self._finalizer = weakref.finalize(self, self._engine.close)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        output_kind: OutputKind = "cumulative",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt, yielding outputs as they come; the last one has ``finished`` set.

        With ``output_kind`` "cumulative" each output holds everything so far, with "delta" what is new since the one
        before, with "final" there is one output at the end. A choice among sequences (``best_of`` above ``n``) can
        only be made at the end, so then there is one output too. Leaving the iteration (break, cancellation) aborts
        the request within one engine step.
        """
        return self._stream(parse_prompt(prompt), sampling_params, request_id, priority, output_kind, True)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        output_kind: OutputKind = "cumulative",
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation; otherwise as ``generate``."""
        (text,) = render_conversations(
            self.get_tokenizer(),
            [messages],
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        prompt = PromptText(text, None)
        return self._stream(prompt, sampling_params, request_id, priority, output_kind, False)

    async def _stream(
        self,
        prompt: PromptText,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int | None,
        output_kind: OutputKind,
        add_special_tokens: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        if output_kind not in ("cumulative", "delta", "final"):
            raise ParameterError("output_kind", output_kind, "one of cumulative, delta, final")
        if request_id is None:
            request_id = uuid.uuid4().hex
        elif not isinstance(request_id, str) or not request_id:
            raise ParameterError("request_id", request_id, "a non-empty string or None")
        self._engine.check()
        token_ids: list[int] | None = None
        if prompt.text is not None and len(prompt.text) > _LONG_TEXT:
            (token_ids,) = await asyncio.to_thread(self._inputs.encode, [prompt], add_special_tokens)
        request, state = self._inputs.request(
            request_id, prompt, params, token_ids=token_ids, add_special_tokens=add_special_tokens, priority=priority
        )
        stream = _Stream(request, state, asyncio.get_running_loop())
        self._engine.add(stream)
        texts = self._engine.outputs.texts
        try:
            while True:
                await stream.wait()
                if stream.failure is not None:
                    raise stream.failure
                output = state.output(texts, output_kind)
                if output is None:
                    continue
                if output.error is not None:
                    raise GenerationError(f"request {request_id} failed: {output.error}")
                yield output
                if output.finished:
                    return
        finally:
            # Nothing happens when it has finished; otherwise nobody reads the answer any more.
            self._engine.abort(request_id, stream)

    async def abort(self, request_id: str) -> bool:
        """End a request within one engine step: its stream gets a last output with finish reason "abort".

        False when no such request runs.
        """
        return self._engine.abort(request_id)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self._loaded.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``generate`` uses when it is given no sampling parameters."""
        return self._inputs.default_params

    async def stats(self) -> EngineStats:
        """Counters of the engine, taken between two steps."""
        stats: EngineStats = await asyncio.wrap_future(self._engine.call(lambda engine: engine.stats()))
        return stats

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; false when running requests hold some of them."""
        done: bool = await asyncio.wrap_future(self._engine.call(lambda engine: engine.reset_prefix_cache()))
        return done

    @property
    def memory_report(self) -> str:
        """Where the memory goes, as a table."""
        return self._loaded.memory_report

    @property
    def num_running(self) -> int:
        """Requests that have been accepted and have not ended."""
        return self._engine.running()

    @property
    def failure(self) -> BaseException | None:
        """The error the engine stopped on, None while it is well."""
        return self._engine.failure

    def shutdown(self) -> None:
        """Stop the engine at the end of its current step; requests that still run get an EngineDeadError."""
        self._finalizer()

    close = shutdown

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The engine's thread may have to finish a step first.
        await asyncio.to_thread(self.shutdown)


def _dead(cause: BaseException | None) -> EngineDeadError:
    if cause is None:
        return EngineDeadError("the engine was closed while the request ran")
    error = EngineDeadError(f"the engine stopped on an error: {cause!r}")
    error.__cause__ = cause
    return error
