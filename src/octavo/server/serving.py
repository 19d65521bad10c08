"""What every handler shares: the engine, the options, the names the model is served under."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.server.failures import Failure, Kind

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM
    from octavo.frontend.encoder import AsyncEncoder
    from octavo.observability.metrics import Metrics
    from octavo.observability.tracing import Tracer
    from octavo.server.call import Call
    from octavo.server.options import ServerOptions

__all__ = ["Serving"]

# What clients of Text Generation Inference send that know an address and no name: `text-generation`, huggingface_hub.
_NO_NAMES = ("", "tgi", "dummy")


def _created() -> int:
    return int(time.time())


@dataclass(kw_only=True)
class Serving:
    """One model being served, one that generates text or an encoder.

    ``created`` is the Unix time of the start; ``draining`` is set by the first SIGTERM. ``calls`` holds the calls that
    are being answered by their request id, ``engine_ids`` the engine's ids of what is being generated for them;
    ``chat_template`` is the text of the chat template to use in place of the model's own, ``observer`` counts and
    ``tracer`` traces what happens.
    """

    service: AsyncLLM | AsyncEncoder
    options: ServerOptions
    model_names: list[str]
    version: str
    observer: Metrics | None = None
    tracer: Tracer | None = None
    chat_template: str | None = None
    created: int = field(default_factory=_created)
    draining: bool = False
    calls: dict[str, set[Call]] = field(default_factory=dict)
    engine_ids: set[str] = field(default_factory=set)

    @property
    def llm(self) -> AsyncLLM:
        """The model that generates; a Failure when what is served is an encoder."""
        from octavo.frontend.async_llm import AsyncLLM

        if not isinstance(self.service, AsyncLLM):
            message = f"The model `{self.model_names[0]}` is an encoder: it makes embeddings and generates no text."
            raise Failure(Kind.invalid, message, param="model", code="not_generative")
        return self.service

    @property
    def encoder(self) -> AsyncEncoder:
        """The encoder; a Failure when what is served generates text."""
        from octavo.frontend.encoder import AsyncEncoder

        if not isinstance(self.service, AsyncEncoder):
            message = f"The model `{self.model_names[0]}` generates text and makes no embeddings: serve an encoder."
            raise Failure(Kind.invalid, message, param="model", code="no_embeddings")
        return self.service

    def check_model(self, name: str | None) -> str:
        """The name a request gets its answer under: the one it asked for, or the first when it named none.

        A name that is not served is a Failure of kind not_found.
        """
        if name is None or (name in _NO_NAMES and name not in self.model_names):
            return self.model_names[0]
        if name not in self.model_names:
            message = f"The model `{name}` does not exist."
            raise Failure(Kind.not_found, message, param="model", code="model_not_found")
        return name
