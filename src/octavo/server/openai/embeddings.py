"""/v1/embeddings: texts or token ids in, their vectors out, where the model that is served is an encoder."""

from __future__ import annotations

import base64
import time
import uuid
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Struct, field

from octavo.errors import ParameterError
from octavo.server.about import about
from octavo.server.endpoints import long_json_response
from octavo.server.openai.errors import read_body
from octavo.server.openai.prompts import as_prompts, encode_off_loop
from octavo.server.openai.usage import Usage, usage_of

if TYPE_CHECKING:
    from starlette.responses import Response

    from octavo.frontend.encoder import Embedding, Encoder
    from octavo.server.call import Call

__all__ = ["EmbeddingAnswer", "EmbeddingItem", "EmbeddingRequest", "embeddings"]


class EmbeddingRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``/v1/embeddings``. Null is the same as absent."""

    model: Annotated[str | None, about("a name of /v1/models", "the model that is served")] = None
    input: Annotated[
        str | list[str | int | list[int]], about("a text, token ids, a list of texts, or a list of lists of token ids")
    ]
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        about("`base64` gives each vector as little-endian float32, a third of the bytes", "float"),
    ] = None
    dimensions: Annotated[
        int | None, about("how many numbers a vector has; only the model's own width is possible", "the model's")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        about("cut texts after so many tokens; -1: after as many as the model takes", "longer texts are refused"),
    ] = None
    user: Annotated[str | None, about("who asks; kept nowhere")] = None


class EmbeddingItem(Struct):
    """The vector of one text: ``index`` is its place in the request."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingAnswer(Struct, kw_only=True):
    """The answer of ``/v1/embeddings``."""

    id: str
    object: Literal["list"] = "list"
    created: int = field(default_factory=lambda: int(time.time()))
    model: str
    data: list[EmbeddingItem]
    usage: Usage


async def embeddings(call: Call) -> Response:
    """The handler of ``/v1/embeddings``."""
    request = await read_body(call, EmbeddingRequest)
    serving = call.serving
    model = call.record.model = serving.check_model(request.model)
    service = serving.encoder
    texts = as_prompts(request.input, "input")
    if len(texts) > serving.options.max_client_batch_size:
        raise ParameterError("input", len(texts), f"at most {serving.options.max_client_batch_size} texts")
    if request.dimensions is not None and request.dimensions != service.encoder.width:
        raise ParameterError("dimensions", request.dimensions, f"{service.encoder.width}, the width of this model")
    keep = _kept(request.truncate_prompt_tokens, service.max_model_len)
    encoder = service.encoder
    ids = await encode_off_loop(lambda: [_tokens(encoder, text, keep) for text in texts], texts)
    found = await service.embed(ids)
    call.record.prompt_tokens = tokens = sum(embedding.num_tokens for embedding in found)

    def answer() -> EmbeddingAnswer:
        as_text = request.encoding_format == "base64"
        return EmbeddingAnswer(
            id=f"embd-{uuid.uuid4().hex}",
            model=model,
            data=[EmbeddingItem(index, _shown(embedding, as_text)) for index, embedding in enumerate(found)],
            usage=usage_of(tokens, 0),
        )

    return await long_json_response(answer, len(found) * encoder.width)


def _kept(asked: int | None, most: int) -> int | None:
    if asked is None or asked == -1:
        return None if asked is None else most
    if not 1 <= asked <= most:
        raise ParameterError("truncate_prompt_tokens", asked, f"-1 or 1 to {most}")
    return asked


def _tokens(encoder: Encoder, text: str | list[int], keep: int | None) -> list[int]:
    return encoder.tokens(text, truncate=keep, field="input")


def _shown(embedding: Embedding, as_text: bool) -> list[float] | str:
    if as_text:
        return base64.b64encode(embedding.vector.astype("<f4").tobytes()).decode("ascii")
    numbers: list[float] = embedding.vector.tolist()
    return numbers
