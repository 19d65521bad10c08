"""AsyncLLM: an engine in a thread or a process of its own, for programs whose requests come and go while others run.

A stream reads the state of its request when its consumer asks for more, so however slow the consumer is, what is kept
for it is the request's own tokens and nothing else: outputs that were not read in time become one.
"""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from octavo.engine.stats import EngineStats
from octavo.errors import ParameterError
from octavo.frontend.conversations import render_conversations
from octavo.frontend.dispatcher import Dispatcher, Stream
from octavo.frontend.engine_link import EngineLink, LocalLink, ProcessLink
from octavo.frontend.generation import Generation
from octavo.frontend.input_processor import InputProcessor, Prompt, PromptText, parse_prompt
from octavo.frontend.loading import LoadedModel, ModelFacts, RemoteModel, load_engine
from octavo.frontend.options import DEFAULT_MODEL, EngineOptions
from octavo.frontend.output_processor import OutputKind
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.tokenizer import load_tokenizer
from octavo.sampling.params import SamplingParams
from octavo.weights.hub import resolve_model

if TYPE_CHECKING:
    from octavo.engine.messages import EngineInfo
    from octavo.frontend.observer import Observer
    from octavo.frontend.tokenizer import Tokenizer

__all__ = ["AsyncLLM"]

# Texts above this many characters are tokenised in a worker thread, so that the event loop goes on serving others.
_LONG_TEXT = 20_000


class AsyncLLM:
    """Generates text for any number of concurrent requests; the keyword arguments are those of ``EngineOptions``.

    With ``separate_process`` the engine runs in a process of its own: when it crashes or hangs it is started again and
    the requests that ran go on with the same text as without the crash. ``observer`` is told what happens to requests.
    A reader that leaves more than ``most_unread`` tokens of its stream unread is paused out of the batch until it
    reads on (None: never). ``engine_timeout`` is how many seconds the engine's process may give no sign of life, and
    ``step_timeout`` how many one step may take, before it is killed and replaced.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        separate_process: bool = False,
        observer: Observer | None = None,
        most_unread: int | None = None,
        engine_timeout: float = 10.0,
        step_timeout: float = 600.0,
        **options: Any,
    ) -> None:
        self.options = EngineOptions.from_kwargs(model=model, **options)
        for name, seconds in (("engine_timeout", engine_timeout), ("step_timeout", step_timeout)):
            if not seconds > 0:
                raise ParameterError(name, seconds, "a number of seconds above 0")
        if not separate_process:
            loaded = load_engine(self.options)
            self._start(loaded, LocalLink(loaded), observer, most_unread)
            return
        # Found, and fetched when it is not here, by this process: it shows the errors, and a restart needs no network.
        path = resolve_model(self.options.model)
        link = ProcessLink(
            asdict(replace(self.options, model=str(path))),
            heartbeat_seconds=min(1.0, engine_timeout / 4),
            hang_seconds=engine_timeout,
            step_seconds=step_timeout,
        )
        link.launch()
        try:
            tokenizer = load_tokenizer(path if self.options.tokenizer is None else self.options.tokenizer)
            info = link.ready()
        except BaseException:
            link.close()
            raise
        remote = RemoteModel(
            options=self.options,
            tokenizer=tokenizer,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            config=info.config,
            generation_config=info.generation_config,
            memory_report=info.memory_report,
        )
        self._start(remote, link, observer, most_unread)

    @classmethod
    def from_loaded(
        cls, loaded: LoadedModel, *, observer: Observer | None = None, most_unread: int | None = None
    ) -> Self:
        """An AsyncLLM on an engine that is already loaded."""
        llm = cls.__new__(cls)
        llm.options = loaded.options
        llm._start(loaded, LocalLink(loaded), observer, most_unread)
        return llm

    def _start(self, loaded: ModelFacts, link: EngineLink, observer: Observer | None, most_unread: int | None) -> None:
        self._loaded = loaded
        self._link = link
        self._inputs = InputProcessor.for_model(loaded)
        self._dispatcher = Dispatcher(link, loaded.tokenizer, observer=observer, most_unread=most_unread)
        # Also runs at exit, before the interpreter would kill the thread in the middle of a step.
        self._finalizer = weakref.finalize(self, self._dispatcher.close)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        output_kind: OutputKind = "cumulative",
        add_special_tokens: bool = True,
        tenant: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt, yielding outputs as they come; the last one has ``finished`` set.

        With ``output_kind`` "cumulative" each output holds everything so far, with "delta" what is new since the one
        before, with "final" there is one output at the end. A choice among sequences (``best_of`` above ``n``) can
        only be made at the end, so then there is one output too. Leaving the iteration (break, cancellation) aborts
        the request within one engine step. Without ``add_special_tokens`` a prompt given as text is tokenised as it
        is. ``tenant`` is whom the policy ``fair`` counts the request for.
        """
        parsed = parse_prompt(prompt)
        return self._stream(parsed, sampling_params, request_id, priority, output_kind, add_special_tokens, tenant)

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
        return self._stream(prompt, sampling_params, request_id, priority, output_kind, False, None)

    async def _stream(
        self,
        prompt: PromptText,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int | None,
        output_kind: OutputKind,
        add_special_tokens: bool,
        tenant: str | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        generation = await self._open(prompt, params, request_id, priority, output_kind, add_special_tokens, tenant)
        try:
            while (output := await generation.next()) is not None:
                yield output
        finally:
            generation.close()

    async def open(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        output_kind: OutputKind = "cumulative",
        add_special_tokens: bool = True,
        tenant: str | None = None,
    ) -> Generation:
        """Start what ``generate`` iterates over, to be read with ``next``; whoever opens it has to close it."""
        parsed = parse_prompt(prompt)
        return await self._open(parsed, sampling_params, request_id, priority, output_kind, add_special_tokens, tenant)

    async def _open(
        self,
        prompt: PromptText,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int | None,
        output_kind: OutputKind,
        add_special_tokens: bool,
        tenant: str | None,
    ) -> Generation:
        if output_kind not in ("cumulative", "delta", "final"):
            raise ParameterError("output_kind", output_kind, "one of cumulative, delta, final")
        if request_id is None:
            request_id = uuid.uuid4().hex
        elif not isinstance(request_id, str) or not request_id:
            raise ParameterError("request_id", request_id, "a non-empty string or None")
        dispatcher = self._dispatcher
        dispatcher.check()
        token_ids: list[int] | None = None
        if prompt.text is not None and len(prompt.text) > _LONG_TEXT:
            (token_ids,) = await asyncio.to_thread(self._inputs.encode, [prompt], add_special_tokens)
        request, state = self._inputs.request(
            request_id, prompt, params, token_ids=token_ids, add_special_tokens=add_special_tokens, priority=priority
        )
        request.tenant = tenant
        stream = Stream(request, state, asyncio.get_running_loop(), paced=output_kind != "final")
        dispatcher.add(stream)
        return Generation(dispatcher, stream, output_kind)

    async def abort(self, request_id: str) -> bool:
        """End a request within one engine step: its stream gets a last output with finish reason "abort".

        False when no such request runs.
        """
        return self._dispatcher.abort(request_id)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self._loaded.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``generate`` uses when it is given no sampling parameters."""
        return self._inputs.default_params

    def pause(self, request_id: str) -> bool:
        """Take a request out of the batch; it keeps what it has and goes on at ``resume``. False: no such request."""
        return self._dispatcher.pause(request_id)

    def resume(self, request_id: str) -> bool:
        """Let a paused request go on. False: no such request."""
        return self._dispatcher.resume(request_id)

    async def stats(self) -> EngineStats:
        """Counters of the engine, taken between two steps. They start anew with an engine that was replaced."""
        value = await asyncio.wrap_future(self._dispatcher.query("stats"))
        return value if isinstance(value, EngineStats) else msgspec.convert(value, EngineStats)

    async def check(self) -> list[str]:
        """Contradictions between the KV cache's books and the requests; none is how it should be."""
        problems: list[str] = await asyncio.wrap_future(self._dispatcher.query("check"))
        return problems

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; false when running requests hold some of them."""
        done: bool = await asyncio.wrap_future(self._dispatcher.query("reset_prefix_cache"))
        return done

    @property
    def memory_report(self) -> str:
        """Where the memory goes, as a table."""
        return self._loaded.memory_report

    @property
    def engine_alive(self) -> bool:
        """Whether the engine is ready and, in a process of its own, has given a sign of life within seconds."""
        return self._dispatcher.failure is None and self._link.alive

    @property
    def engine_info(self) -> EngineInfo:
        """The process, sizes and limits of the engine; of the last one while it is being replaced."""
        return self._link.info

    def is_running(self, request_id: str) -> bool:
        """Whether a request of this id was accepted and has not ended; one that is aborted ends a moment later."""
        return self._dispatcher.is_running(request_id)

    def has_started(self, request_id: str) -> bool:
        """Whether an engine has begun to compute a request; true also for one that has ended or is unknown."""
        return self._dispatcher.has_started(request_id)

    @property
    def engine_restarts(self) -> int:
        """How often the engine was replaced."""
        return self._dispatcher.restarts

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus answer in tokens."""
        return self._loaded.max_model_len

    @property
    def vocab_size(self) -> int:
        """How many token ids the model knows: 0 to this less 1."""
        return self._loaded.vocab_size

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The model's own defaults of sampling, as its files have them."""
        return self._loaded.generation_config

    @property
    def num_waiting(self) -> int:
        """Of the requests that have not ended, those of which nothing has been computed yet."""
        return self._dispatcher.waiting()

    @property
    def num_running(self) -> int:
        """Requests that have been accepted and have not ended."""
        return self._dispatcher.running()

    @property
    def failure(self) -> BaseException | None:
        """The error the engine stopped on, None while it is well."""
        return self._dispatcher.failure

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
