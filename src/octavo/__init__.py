"""octavo: a CPU-first engine for large language models. Every public name is imported on first use."""

from __future__ import annotations

TYPE_CHECKING = False  # what type checkers take for true; importing typing would cost more than all the rest here

if TYPE_CHECKING:
    from typing import Any

    from octavo.errors import (
        CapacityError,
        ConfigError,
        DownloadError,
        EngineDeadError,
        GenerationError,
        ModelError,
        OctavoError,
        ParameterError,
        WeightsError,
    )
    from octavo.frontend.async_llm import AsyncLLM
    from octavo.frontend.encoder import AsyncEncoder, Embedding, Encoder
    from octavo.frontend.llm import LLM
    from octavo.frontend.options import EngineOptions
    from octavo.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from octavo.sampling.params import SamplingParams
    from octavo.server.runner import serve

    __version__: str

__all__ = [
    "LLM",
    "AsyncEncoder",
    "AsyncLLM",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "DownloadError",
    "Embedding",
    "Encoder",
    "EngineDeadError",
    "EngineOptions",
    "GenerationError",
    "Logprob",
    "ModelError",
    "OctavoError",
    "ParameterError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "WeightsError",
    "__version__",
    "serve",
]

_HOMES = {
    "LLM": "octavo.frontend.llm",
    "AsyncLLM": "octavo.frontend.async_llm",
    "AsyncEncoder": "octavo.frontend.encoder",
    "Embedding": "octavo.frontend.encoder",
    "Encoder": "octavo.frontend.encoder",
    "EngineOptions": "octavo.frontend.options",
    "CompletionOutput": "octavo.frontend.outputs",
    "Logprob": "octavo.frontend.outputs",
    "RequestMetrics": "octavo.frontend.outputs",
    "RequestOutput": "octavo.frontend.outputs",
    "SamplingParams": "octavo.sampling.params",
    "CapacityError": "octavo.errors",
    "ConfigError": "octavo.errors",
    "DownloadError": "octavo.errors",
    "EngineDeadError": "octavo.errors",
    "GenerationError": "octavo.errors",
    "ModelError": "octavo.errors",
    "OctavoError": "octavo.errors",
    "ParameterError": "octavo.errors",
    "WeightsError": "octavo.errors",
    "serve": "octavo.server.runner",
}


def __getattr__(name: str) -> Any:
    # Importing the engine takes far longer than most uses of `import octavo` need, so names are fetched when used.
    if name == "__version__":
        value: Any = _version()
    else:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'octavo' has no attribute {name!r}")
        import importlib

        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("octavo")
    except PackageNotFoundError:
        return "0+source"
