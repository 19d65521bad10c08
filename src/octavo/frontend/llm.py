"""LLM: an engine in the calling thread, for programs that have their prompts at hand and wait for the answers."""

from __future__ import annotations

import itertools
import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from octavo.errors import EngineDeadError, ParameterError
from octavo.frontend.conversations import render_conversations
from octavo.frontend.input_processor import InputProcessor, Prompt, PromptText, parse_prompt, split_prompts
from octavo.frontend.loading import LoadedModel, load_engine
from octavo.frontend.options import DEFAULT_MODEL, EngineOptions
from octavo.frontend.output_processor import OutputKind, OutputProcessor, Processed, RequestState
from octavo.frontend.outputs import RequestOutput
from octavo.sampling.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo.engine.request import EngineRequest
    from octavo.engine.stats import EngineStats
    from octavo.frontend.tokenizer import Tokenizer
    from octavo.planning.memory import MemoryPlan

__all__ = ["LLM"]

_log = logging.getLogger(__name__)


class LLM:
    """Generates text offline: give it prompts, get the answers in the same order.

    The keyword arguments are those of ``EngineOptions``. ``generate`` and ``chat`` may be called from several threads;
    one call runs at a time. Use ``AsyncLLM`` for requests that come and go.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        self.options = EngineOptions.from_kwargs(model=model, **options)
        self._start(load_engine(self.options))

    @classmethod
    def from_loaded(cls, loaded: LoadedModel) -> Self:
        """An LLM on an engine that is already loaded."""
        llm = cls.__new__(cls)
        llm.options = loaded.options
        llm._start(loaded)
        return llm

    def _start(self, loaded: LoadedModel) -> None:
        self._loaded: LoadedModel | None = loaded
        self._inputs = InputProcessor.for_model(loaded)
        self._outputs = OutputProcessor(loaded.tokenizer)
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._failure: BaseException | None = None

    # -- what callers use

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or a list of them; the results are in the order of the prompts.

        A prompt is a string, a list of token ids, or a dictionary with "prompt" or "prompt_token_ids" (and maybe a
        "cache_salt"). ``sampling_params`` is one for all prompts or one for each; without it, what the model's
        generation_config says (``get_default_sampling_params``). All prompts are checked before any is run. A request
        that fails while it runs has finish reason "error" and ``RequestOutput.error``; the others are not affected.
        Ctrl-C stops at the end of the current step, drops the requests and leaves the LLM ready for use.
        """
        return self._generate(split_prompts(prompts), sampling_params, use_tqdm, priority, add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, put into text by the model's chat template.

        ``continue_final_message`` goes on with the last message instead of answering it, and needs
        ``add_generation_prompt=False``.
        """
        texts = render_conversations(
            self.get_tokenizer(),
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        # The template writes the special tokens itself.
        prompts = [PromptText(text, None) for text in texts]
        return self._generate(prompts, sampling_params, use_tqdm, priority, add_special_tokens=False)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        priority: int | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Generate for one prompt, yielding an output after each step that changed it; the last one is ``finished``.

        Closing the iterator, or leaving its loop, aborts the request. ``output_kind`` is as in ``AsyncLLM.generate``.
        """
        parsed = parse_prompt(prompt)
        with self._lock:
            engine = self._require().engine
            request, state = self._inputs.request(str(next(self._numbers)), parsed, sampling_params, priority=priority)
            engine.add(request)
            self._outputs.add(state)
        try:
            seen = -1
            while True:
                with self._lock, _DeferredInterrupt():
                    if not state.finished:
                        self._step()
                if state.num_tokens == seen and not state.finished:
                    continue
                seen = state.num_tokens
                began = time.perf_counter()
                output = state.output(self._outputs.texts, output_kind)
                self._detokenised(began)
                if output is not None:
                    yield output
                    if output.finished:
                        return
        finally:
            with self._lock:
                self._drop([state])

    def prompt_logits(self, prompt_token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The logits that follow every position of a prompt, float32 [tokens, vocabulary]."""
        with self._lock:
            loaded = self._require()
            token_ids = parse_prompt(prompt_token_ids).token_ids
            if not token_ids or len(token_ids) > loaded.max_model_len:
                limit = f"a list of 1 to {loaded.max_model_len} token ids"
                raise ParameterError("prompt_token_ids", prompt_token_ids, limit)
            self._inputs.check_vocabulary(token_ids)
            return loaded.prompt_logits(token_ids)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self._require().tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``generate`` uses when it is given no sampling parameters."""
        return self._inputs.default_params

    def stats(self) -> EngineStats:
        """Counters of the engine."""
        with self._lock:
            return self._require().engine.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; false when open streams hold some of them."""
        with self._lock:
            return self._require().engine.reset_prefix_cache()

    def profile(self) -> list[dict[str, Any]]:
        """Calls and time of each native operation so far; needs ``LLM(..., profile=True)``."""
        return self._require_profile().profile()

    def profile_steps(self) -> list[dict[str, Any]]:
        """For steps of prompts ("prefill"), of decodes and of both ("mixed") the milliseconds of each phase of a step
        ("phases_ms") and of each native operation ("operations") so far; needs ``LLM(..., profile=True)``."""
        return self._require_profile().profile_steps()

    def wait_for_memory(self, timeout: float = 10.0) -> bool:
        """Wait, at most `timeout` seconds, until the KV blocks used first have memory (see `kv_prefault_bytes`).

        For measurements, which should not begin while the system still finds it. False when the time was too short.
        """
        backend = self._require().backend
        end = time.monotonic() + timeout
        while not backend.prefaulted and time.monotonic() < end:
            time.sleep(0.01)
        return bool(backend.prefaulted)

    def reset_profile(self) -> None:
        """Start both profiles again from zero."""
        with self._lock:
            self._require_profile().reset_profile()

    def _require_profile(self) -> LoadedModel:
        if not self.options.profile:
            raise ParameterError("profile", False, "True", "nothing was measured: start the engine with profile=True")
        return self._require()

    @property
    def max_model_len(self) -> int:
        """Most tokens a prompt and its answer can have together."""
        return self._require().max_model_len

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """Where the memory goes, in bytes; None for an engine that was not loaded from a model."""
        return self._require().plan

    @property
    def memory_report(self) -> str:
        """Where the memory goes, as a table."""
        return self._require().memory_report

    def close(self) -> None:
        """Free the engine and its memory; the LLM cannot be used after this."""
        with self._lock:
            loaded, self._loaded = self._loaded, None
            if loaded is not None:
                loaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- how it runs

    def _require(self) -> LoadedModel:
        if self._failure is not None:
            raise EngineDeadError(
                f"the engine stopped on an error, make a new LLM: {self._failure!r}"
            ) from self._failure
        if self._loaded is None:
            raise EngineDeadError("this LLM is closed: make a new one")
        return self._loaded

    def _generate(
        self,
        prompts: list[PromptText],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | None,
        *,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        params = _one_each("sampling_params", sampling_params, SamplingParams, len(prompts))
        priorities = _one_each("priority", priority, int, len(prompts))
        with self._lock:
            self._require()
            token_ids = self._inputs.encode(prompts, add_special_tokens)
            requests = [
                self._inputs.request(
                    str(next(self._numbers)),
                    prompt,
                    params[index],
                    token_ids=token_ids[index],
                    priority=priorities[index],
                )
                for index, prompt in enumerate(prompts)
            ]
            self._run(requests, use_tqdm)
            began = time.perf_counter()
            outputs = [state.output(self._outputs.texts) for _, state in requests]
            self._detokenised(began)
        return [output for output in outputs if output is not None]

    def _run(self, requests: list[tuple[EngineRequest, RequestState]], use_tqdm: bool | Callable[..., Any]) -> None:
        """Run requests to their end. Requests of streams that are open in this LLM go on with them."""
        engine = self._require().engine
        left = len(requests)
        mine = {state.request_id for _, state in requests}
        with _DeferredInterrupt() as interrupt, _Progress(left, use_tqdm) as progress:
            try:
                for request, state in requests:
                    engine.add(request)
                    self._outputs.add(state)
                while left:
                    processed = self._step()
                    for state in processed.finished:
                        if state.request_id in mine:
                            left -= 1
                            progress.finish()
                            if state.error is not None:
                                _log.warning("request %s failed: %s", state.request_id, state.error)
                    progress.tokens(processed.num_prompt_tokens, processed.num_tokens)
                    if interrupt.requested:
                        raise KeyboardInterrupt
            except BaseException:
                self._drop([state for _, state in requests])
                raise

    def _step(self) -> Processed:
        """One step of the engine, its outputs given to the requests."""
        engine = self._require().engine
        try:
            outputs = engine.step()
            began = time.perf_counter()
            processed = self._outputs.process(outputs)
            for request_id, index, reason in processed.stops:
                engine.finish(request_id, index, reason)
            self._detokenised(began)
        except BaseException as error:
            # What the engine knows of its blocks can no longer be trusted.
            self._failure = error
            if isinstance(error, Exception):
                raise EngineDeadError(f"the engine stopped on an error: {error!r}") from error
            raise
        return processed

    def _detokenised(self, began: float) -> None:
        """Add the time since then to the profile, if there is one."""
        phases = None if self._loaded is None else self._loaded.engine.phases
        if phases is not None:
            phases.add("detokenising", time.perf_counter() - began)

    def _drop(self, states: list[RequestState]) -> None:
        """Abort the requests that have not finished."""
        for state in states:
            if (
                self._outputs.remove(state.request_id) is not None
                and self._failure is None
                and self._loaded is not None
            ):
                self._loaded.engine.abort(state.request_id)


def _one_each(name: str, values: Any, kind: type, count: int) -> list[Any]:
    """One value for all requests, or as many as there are."""
    if values is None or isinstance(values, kind):
        return [values] * count
    if not isinstance(values, Sequence) or not all(isinstance(value, kind) for value in values):
        raise ParameterError(name, values, f"a {kind.__name__}, a list of them, or None")
    if len(values) != count:
        raise ParameterError(
            name, len(values), f"one for all prompts or one for each of the {count}",
            f"{name} must be one for all prompts or one for each: there are {count} prompts and {len(values)} {name}",
        )  # fmt: skip
    return list(values)


class _DeferredInterrupt:
    """Keeps Ctrl-C until the current step is done: an exception in the middle of one would leave the engine torn.

    A second Ctrl-C does not wait, at the price of the engine.
    Only where Ctrl-C would raise KeyboardInterrupt here, that is in the main thread with Python's own handler.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> _DeferredInterrupt:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            if self.requested and kind is None:
                raise KeyboardInterrupt


class _Progress:
    """A progress bar over requests that shows the rates of prompt and generated tokens."""

    _INTERVAL = 0.5  # seconds between changes of the rates

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        self._bar: Any = None
        self._start = self._shown = time.monotonic()
        self._prompt_tokens = 0
        self._output_tokens = 0
        if use_tqdm and total:
            make: Any = use_tqdm
            if use_tqdm is True:
                from tqdm.auto import tqdm  # type: ignore[import-untyped]

                make = tqdm
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._show(time.monotonic())
            self._bar.close()

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def tokens(self, prompt: int, output: int) -> None:
        self._prompt_tokens += prompt
        self._output_tokens += output
        if self._bar is not None:
            now = time.monotonic()
            if now - self._shown >= self._INTERVAL:
                self._show(now)

    def _show(self, now: float) -> None:
        self._shown = now
        seconds = max(now - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._prompt_tokens / seconds:.1f} tok/s, output: {self._output_tokens / seconds:.1f} tok/s"
        )
