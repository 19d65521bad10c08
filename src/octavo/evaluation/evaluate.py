"""Runs one model, or two side by side, over windows of text and measures what they predict."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError
from octavo.evaluation.measures import Divergence, Likelihood, log_softmax, standard_error
from octavo.evaluation.texts import Text, beginning
from octavo.evaluation.windows import Window, text_windows

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM

__all__ = ["Evaluation", "Logits", "evaluate", "open_model", "windows_of"]

Logits: TypeAlias = Callable[[list[int]], NDArray[np.float32]]
"""Gives the logits [tokens, vocabulary] that follow every position of a window."""

# Rows taken to float64 at once: a vocabulary of 128 k makes 64 MB of each array of them.
_ROWS = 64
_TOKENS_AT_ONCE = 512
_BLOCK = 16


@dataclass(slots=True)
class Evaluation:
    """What was measured so far. ``reference`` and ``divergence`` stay empty without a reference."""

    model: Likelihood = field(default_factory=Likelihood)
    reference: Likelihood = field(default_factory=Likelihood)
    divergence: Divergence = field(default_factory=Divergence)
    windows: int = 0
    compared: bool = False
    digest: Any = field(default_factory=hashlib.sha256)

    def summary(self) -> dict[str, Any]:
        """All figures, as they are recorded; ``tokens_sha256`` is of the windows' token ids as little-endian int32."""
        found: dict[str, Any] = {"windows": self.windows, "tokens_sha256": self.digest.hexdigest()}
        found["perplexity"] = self.model.summary()
        if self.compared:
            found["reference_perplexity"] = self.reference.summary()
            # The same tokens in both, so the difference is far more certain than either of them.
            difference = self.model.losses - self.reference.losses
            found["nll_difference"] = float(difference.mean())
            found["nll_difference_error"] = standard_error(difference)
            found["divergence"] = self.divergence.summary()
        return found


def evaluate(
    model: Logits,
    windows: Iterable[Window],
    *,
    reference: Logits | None = None,
    progress: Callable[[Window, Evaluation], None] | None = None,
) -> Evaluation:
    """Measure ``model``, and its divergence from ``reference`` if there is one, on every window.

    Logits of one window exist at a time. Raises ModelError when the two have vocabularies of different sizes.
    """
    result = Evaluation(compared=reference is not None)
    for window in windows:
        got = model(window.ids)
        expected = None if reference is None else reference(window.ids)
        if expected is not None and expected.shape != got.shape:
            raise ModelError(
                f"the model gives logits of shape {got.shape}, the reference {expected.shape}: they cannot be compared"
            )
        _add(result, window, got, expected)
        result.windows += 1
        result.digest.update(np.array(window.ids, dtype="<i4").tobytes())
        if progress is not None:
            progress(window, result)
    if not result.windows:
        raise ModelError("the text is too short to measure anything: it gives no window of two tokens")
    return result


def _add(result: Evaluation, window: Window, got: NDArray[np.float32], expected: NDArray[np.float32] | None) -> None:
    ids = np.asarray(window.ids, np.int64)
    # The token after the last position seen before is new; the position itself was compared before.
    first, scored = window.seen, max(0, window.seen - 1)
    for start in range(scored, len(ids), _ROWS):
        stop = min(start + _ROWS, len(ids))
        targets = ids[start + 1 : stop + 1]
        rows = log_softmax(got[start:stop])
        result.model.add(rows[: len(targets)], targets)
        if expected is not None:
            wanted = log_softmax(expected[start:stop])
            result.reference.add(wanted[: len(targets)], targets)
            skip = max(0, first - start)
            result.divergence.add(wanted[skip:], rows[skip:])


def windows_of(
    llm: LLM, text: Text, length: int, *, stride: int | None = None, most: int | None = None
) -> list[Window]:
    """The windows of a text, tokenised as the model does; each begins with what its tokenizer begins texts with."""
    tokenizer = llm.get_tokenizer()
    ids = list(tokenizer.encode(text.content, add_special_tokens=False))
    prefix = beginning(lambda part: list(tokenizer.encode(part)))
    # What both share may be text too, where a tokenizer marks the beginning of words.
    plain = beginning(lambda part: list(tokenizer.encode(part, add_special_tokens=False)))
    if plain and prefix[-len(plain) :] == plain:
        prefix = prefix[: -len(plain)]
    return list(text_windows(text.name, ids, length, stride=stride, most=most, prefix=prefix))


def open_model(
    path: str,
    window_tokens: int,
    *,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    threads: int | None = None,
    tokenizer: str | None = None,
) -> LLM:
    """An engine for ``prompt_logits`` of windows of so many tokens, that takes little memory besides its weights.

    ``quantization`` may also be "f32": float32 weights and arithmetic, the yardstick.
    """
    from octavo.frontend.llm import LLM

    return LLM(
        path,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        threads=threads,
        tokenizer=tokenizer,
        max_model_len=max(2, window_tokens),
        max_num_batched_tokens=min(window_tokens, _TOKENS_AT_ONCE),
        max_num_seqs=1,
        num_gpu_blocks_override=-(-window_tokens // _BLOCK) + 1,
        kv_prefault_bytes=0,
        enable_prefix_caching=False,
    )
