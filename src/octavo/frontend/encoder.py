"""Encoder: texts to vectors, for search and comparison; AsyncEncoder, which computes those of many callers together.

Texts that wait are computed in one step as far as its tokens go, whoever sent them: what comes out for a text depends
on the text alone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu.backend import instruction_set
from octavo.backends.cpu.encoder import CpuEncoder
from octavo.backends.cpu.tuning_cache import choices_for
from octavo.errors import CapacityError, EngineDeadError, ModelError, ParameterError
from octavo.frontend.description import describe_model, encoder_bytes
from octavo.frontend.input_processor import Prompt, split_prompts
from octavo.frontend.options import DEFAULT_MODEL, EngineOptions
from octavo.frontend.pooling import POOLINGS, Pooling, PoolingKind, read_pooling
from octavo.frontend.tokenizer import give_back_memory, load_tokenizer
from octavo.planning.hardware import probe
from octavo.planning.memory import memory_budget
from octavo.planning.units import format_bytes
from octavo.weights.hub import resolve_model

if TYPE_CHECKING:
    from octavo.frontend.tokenizer import Tokenizer

__all__ = ["AsyncEncoder", "Embedding", "Encoder"]

_log = logging.getLogger(__name__)

# Options that say something of encoders; any other that is set is refused.
_HONOURED = frozenset(
    {"model", "tokenizer", "quantization", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "threads"}
    | {"tuning", "memory_utilization"}
)


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector [width] of a text, float32, and how many tokens the text has."""

    vector: NDArray[np.float32]
    num_tokens: int


class Encoder:
    """Makes vectors of texts with a BERT-type model.

    ``pooling`` (cls, mean, max, last or mean_sqrt_len) and ``normalize`` replace what the model's own files say. The
    other keyword arguments are those of ``EngineOptions`` that concern an encoder: tokenizer, quantization,
    max_model_len, max_num_batched_tokens, max_num_seqs, threads, tuning and memory_utilization.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        pooling: PoolingKind | None = None,
        normalize: bool | None = None,
        **options: Any,
    ) -> None:
        if pooling is not None and pooling not in POOLINGS:
            raise ParameterError("pooling", pooling, "one of " + ", ".join(POOLINGS))
        self.options = EngineOptions.from_kwargs(model=model, **options)
        _check_options(self.options)
        path = resolve_model(self.options.model)
        self.pooling = read_pooling(path if path.is_dir() else path.parent)
        if pooling is not None:
            self.pooling = replace(self.pooling, kind=pooling)
        if normalize is not None:
            self.pooling = replace(self.pooling, normalize=normalize)
        self._load(path)
        give_back_memory()

    def _load(self, path: Path) -> None:
        options = self.options
        with describe_model(path) as description:
            graph = description.graph
            if not graph.encoder:
                raise ModelError(f"{path}: {graph.architecture} generates text and makes no embeddings; use octavo.LLM")
            self.max_model_len = _max_model_len(options, graph.max_position, self.pooling)
            self.max_tokens = max(options.max_num_batched_tokens, self.max_model_len)
            self.vocab_size = graph.vocab_size
            hardware = probe()
            needed = encoder_bytes(description, options, self.max_tokens)
            budget, _, _ = memory_budget(hardware, options.memory_utilization)
            if needed > budget:
                raise CapacityError(
                    f"{path}: needs {format_bytes(needed)}, {format_bytes(budget)} are available; lower "
                    "max_num_batched_tokens or set quantization",
                    needed=needed,
                    available=budget,
                    unit="bytes",
                )
            self.threads = options.threads or hardware.default_threads
            self.tokenizer = load_tokenizer(description.checkpoint if options.tokenizer is None else options.tokenizer)
            self.config: Mapping[str, Any] = description.checkpoint.config
            self._backend: CpuEncoder | None = CpuEncoder.load(
                graph,
                description.checkpoint,
                quantization=options.quantization,
                max_tokens=self.max_tokens,
                max_texts=options.max_num_seqs,
                max_model_len=self.max_model_len,
                threads=self.threads,
            )
        tuning = self._backend.tune(*choices_for(options.tuning, hardware.cpu_model, instruction_set(), self.threads))
        self.memory_report = (
            f"memory {format_bytes(needed)} of {format_bytes(budget)}; {self.width} numbers a text, {self.pooling}; "
            f"texts of up to {self.max_model_len} tokens\ntuning: {tuning}"
        )

    @property
    def width(self) -> int:
        """How many numbers a vector has."""
        return self._require().width

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.tokenizer

    def embed(self, prompts: Prompt | Sequence[Prompt], *, truncate: bool = False) -> list[Embedding]:
        """The vectors of texts (or of token ids), in their order.

        A text longer than ``max_model_len`` tokens is refused, or with ``truncate`` cut at its end.
        """
        keep = self.max_model_len if truncate else None
        texts = [
            self.tokens(prompt.token_ids if prompt.text is None else prompt.text, truncate=keep)
            for prompt in split_prompts(prompts)
        ]
        return self.embed_tokens(texts)

    def tokens(
        self, text: str | Sequence[int] | None, *, truncate: int | None = None, field: str = "prompt"
    ) -> list[int]:
        """A text as the token ids that are computed, checked; ``field`` is what an error calls it.

        ``truncate``: how many tokens are kept of a longer text; None refuses one that is too long for the model.
        """
        ids = self.tokenizer.encode(text) if isinstance(text, str) else list(text or ())
        if not ids:
            raise ParameterError(field, text, "at least one token long", f"{field} must be at least one token long")
        if truncate is not None and len(ids) > truncate:
            # What the tokenizer puts at the end (a separator) stays at the end.
            tail = _closing(self.tokenizer) if isinstance(text, str) else []
            ids = ids[: max(0, truncate - len(tail))] + tail[-truncate:]
        if len(ids) > self.max_model_len:
            raise ParameterError(
                field,
                len(ids),
                f"at most {self.max_model_len} tokens",
                f"{field} has {len(ids)} tokens, and this model takes at most {self.max_model_len}",
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise ParameterError(field, wrong, f"token ids from 0 to {self.vocab_size - 1}")
        return ids

    def embed_tokens(self, texts: Sequence[Sequence[int]]) -> list[Embedding]:
        """The vectors of texts given as token ids that `tokens` made."""
        found: list[Embedding | None] = [None] * len(texts)
        # By length, so that the texts of a step are alike; the order changes no bit of any.
        waiting = deque(sorted(range(len(texts)), key=lambda index: len(texts[index])))
        while waiting:
            step = self.next_step(waiting, texts)
            for index, embedding in zip(step, self.compute([texts[index] for index in step]), strict=True):
                found[index] = embedding
        return [embedding for embedding in found if embedding is not None]

    def next_step(self, waiting: deque[int], texts: Sequence[Sequence[int]]) -> list[int]:
        """Take off ``waiting`` what fits in one step: at least one text."""
        backend, step, tokens = self._require(), list[int](), 0
        while waiting and len(step) < backend.max_texts and tokens + len(texts[waiting[0]]) <= backend.max_tokens:
            tokens += len(texts[waiting[0]])
            step.append(waiting.popleft())
        return step

    def compute(self, texts: Sequence[Sequence[int]]) -> list[Embedding]:
        """One step."""
        vectors = self._require().encode(texts, self.pooling.rows)
        return [
            Embedding(self.pooling.pool(rows), len(ids)) for rows, ids in zip(vectors, texts, strict=True)
        ]  # fmt: skip

    def close(self) -> None:
        """Free the memory."""
        self._backend = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _require(self) -> CpuEncoder:
        if self._backend is None:
            raise EngineDeadError("this encoder was closed")
        return self._backend


@dataclass(slots=True, eq=False)
class _Waiting:
    """A text that waits to be computed for somebody."""

    ids: Sequence[int]
    future: asyncio.Future[Embedding]


class AsyncEncoder:
    """An Encoder in a thread of its own, for callers that come and go; the arguments are those of Encoder.

    It answers the questions a server asks of what it serves, as AsyncLLM does.
    """

    generation_config: Mapping[str, Any] = {}

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        self.encoder = Encoder(model, **options)
        self.options = self.encoder.options
        self.failure: BaseException | None = None
        self._waiting: deque[_Waiting] = deque()
        self._running = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="octavo-encoder", daemon=True)
        self._thread.start()

    @property
    def max_model_len(self) -> int:
        """The longest text in tokens."""
        return self.encoder.max_model_len

    @property
    def vocab_size(self) -> int:
        """Tokens the model knows."""
        return self.encoder.vocab_size

    @property
    def memory_report(self) -> str:
        """What it takes, and how texts become vectors."""
        return self.encoder.memory_report

    @property
    def engine_alive(self) -> bool:
        """Whether texts are computed."""
        return self.failure is None and self._thread.is_alive()

    @property
    def num_running(self) -> int:
        """Texts that are being computed or wait for it."""
        return self._running + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Texts that wait."""
        return len(self._waiting)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.encoder.tokenizer

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[Embedding]:
        """The vectors of texts given as token ids that `Encoder.tokens` made.

        A caller that is cancelled takes back its texts.
        """
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(ids, loop.create_future()) for ids in texts]
        with self._changed:
            if not self.engine_alive or self._closing:
                raise EngineDeadError("the encoder has stopped")
            self._waiting.extend(waiting)
            self._changed.notify()
        try:
            return list(await asyncio.gather(*(item.future for item in waiting)))
        except BaseException:
            for item in waiting:
                item.future.cancel()
            raise

    def shutdown(self) -> None:
        """End the thread; what still waits fails."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self.encoder.close()

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # whoever watches must learn of it, and nobody wait for ever
            self.failure = error
            with self._changed:
                left = list(self._waiting)
                self._waiting.clear()
            self._finish([(item, EngineDeadError("the encoder has stopped")) for item in left])
            raise

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    left, error = list(self._waiting), EngineDeadError("the encoder has stopped")
                    self._waiting.clear()
                    break
                pending = [item for item in self._waiting if not item.future.cancelled()]
                step = self.encoder.next_step(deque(range(len(pending))), [item.ids for item in pending])
                taken = [pending[index] for index in step]
                self._waiting = deque(pending[len(taken) :])
                self._running = len(taken)
            try:
                results = self.encoder.compute([item.ids for item in taken]) if taken else []
            except Exception as failure:  # the step's callers get it, later ones are tried
                _log.exception("a step of the encoder failed")
                self._finish([(item, failure) for item in taken])
            else:
                self._finish(list(zip(taken, results, strict=True)))
            self._running = 0
        self._finish([(item, error) for item in left])

    @staticmethod
    def _finish(results: Sequence[tuple[_Waiting, Embedding | BaseException]]) -> None:
        """Hand results to the loops their callers run in, one call for each loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Waiting, Embedding | BaseException]]] = {}
        for item, result in results:
            by_loop.setdefault(item.future.get_loop(), []).append((item, result))
        for loop, items in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, items)


def _settle(items: Sequence[tuple[_Waiting, Embedding | BaseException]]) -> None:
    for item, result in items:
        if item.future.done():
            continue
        if isinstance(result, BaseException):
            item.future.set_exception(result)
        else:
            item.future.set_result(result)


def _check_options(options: EngineOptions) -> None:
    """Refuse what an encoder would ignore; the server's own defaults count as not set."""
    defaults = EngineOptions(model=options.model)
    for field in fields(options):
        value = getattr(options, field.name)
        server_default = (field.name, value) in (("seed", None), ("max_step_seconds", 0.2))
        if field.name not in _HONOURED and value != getattr(defaults, field.name) and not server_default:
            raise ParameterError(
                field.name,
                value,
                "left out",
                f"{field.name} is an option of models that generate text; {options.model} is an encoder",
            )


def _max_model_len(options: EngineOptions, most: int, pooling: Pooling) -> int:
    if options.max_model_len is None:
        return min(most, pooling.max_tokens or most)
    if options.max_model_len > most:
        raise ParameterError("max_model_len", options.max_model_len, f"at most the model's {most}")
    return options.max_model_len


def _closing(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer adds behind a text."""
    plain, framed = tokenizer.encode("a", False), tokenizer.encode("a", True)
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return framed[start + len(plain) :]
    return []
