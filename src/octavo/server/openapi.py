"""The description of every route as an OpenAPI 3.1 document, made from the endpoints and their msgspec types."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from octavo.server.endpoints import Dialect, Endpoint, NestedDialect
from octavo.server.failures import Failure, Kind

if TYPE_CHECKING:
    from octavo.server.call import Call
    from octavo.server.serving import Serving

__all__ = ["describe", "endpoints"]

_EVENTS = "text/event-stream"


class ErrorDetail(msgspec.Struct):
    """What went wrong: a sentence, its class, the field at fault, and a code."""

    message: str
    type: str | None
    param: str | None
    code: int | str | None


class NestedError(msgspec.Struct):
    """An error in OpenAI's shape."""

    error: ErrorDetail


class FlatError(msgspec.Struct):
    """An error in the shape of Text Generation Inference."""

    error: str
    error_type: str


def endpoints(others: Sequence[Endpoint], serving: Serving) -> list[Endpoint]:
    """The routes that give the document, which describes them too."""
    described: list[Endpoint] = list(others)

    @cache
    def document() -> bytes:
        return msgspec.json.encode(describe(described, serving.version))

    async def answer(call: Call) -> Response:
        return Response(document(), media_type="application/json")

    paths = ("/openapi.json", "/api-doc/openapi.json")
    own = [
        Endpoint(
            method="GET",
            path=path,
            handler=answer,
            dialect=NestedDialect(),
            summary="This document",
            answer=dict[str, Any],
        )
        for path in paths
    ]
    described.extend(own)
    return own


def describe(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    """The document of these endpoints."""
    types = [NestedError, FlatError]
    for endpoint in endpoints:
        types.extend(one for one in (*_several(endpoint.body), *_several(endpoint.answer)) if not isinstance(one, str))
    unique = list({repr(type_): type_ for type_ in types}.values())
    schemas, components = msgspec.json.schema_components(unique, ref_template="#/components/schemas/{name}")
    by_type = {repr(type_): schema for type_, schema in zip(unique, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in sorted(endpoints, key=lambda one: (one.path, one.method)):
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path, by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "octavo",
            "version": version,
            "description": "A language model over HTTP in the dialects of OpenAI, vLLM and Text Generation Inference. "
            "`/v1/stream` takes the same requests over a WebSocket. Null is the same as absent; an unknown field is "
            "refused.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _several(types: Any) -> tuple[Any, ...]:
    """What a route takes or gives as a tuple of types and media types."""
    if types is None:
        return ()
    return types if isinstance(types, tuple) else (types,)


def _schema(types: Sequence[Any], schemas: dict[str, Any]) -> dict[str, Any]:
    found = [schemas[repr(type_)] for type_ in types]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _operation(endpoint: Endpoint, path: str, schemas: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": re.sub(r"\W+", "_", f"{endpoint.method.lower()}{path}").strip("_") or endpoint.method.lower(),
        "tags": [endpoint.dialect.name],
    }
    names = re.findall(r"\{(\w+)\}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _schema(_several(endpoint.body), schemas)}},
        }
    operation["security"] = [{"key": []}] if endpoint.guarded else []
    operation["responses"] = {"200": _success(endpoint, schemas), **dict(_failures(endpoint, bool(names), schemas))}
    return operation


def _success(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "Success"}
    given = _several(endpoint.answer)
    types = [one for one in given if not isinstance(one, str)]
    content = {media: _text(media) for media in given if isinstance(media, str)}
    if types:
        content["application/json"] = {"schema": _schema(types, schemas)}
        if any("stream" in _fields(body) for body in _several(endpoint.body)):
            content[_EVENTS] = _text(_EVENTS)
    if content:
        answer["content"] = content
    return answer


def _text(media: str) -> dict[str, Any]:
    """What is not JSON. A schema of a stream would be one of each event, which has fields of its own."""
    return {} if media == _EVENTS else {"schema": {"type": "string"}}


def _fields(type_: Any) -> tuple[str, ...]:
    fields: tuple[str, ...] = getattr(type_, "__struct_fields__", ())
    return fields


def _failures(endpoint: Endpoint, has_parameters: bool, schemas: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Status and description of each failure the endpoint can have, as its dialect words it."""
    messages: dict[int, list[str]] = {}
    shapes: dict[int, list[Any]] = {}
    waits: set[int] = set()
    refused: list[tuple[Dialect, Failure]] = [(NestedDialect(), failure) for failure in _REFUSED]
    possible: list[tuple[Dialect, Failure]] = [
        (endpoint.dialect, failure) for failure in _possible(endpoint, has_parameters)
    ]
    if len(_several(endpoint.body)) > 1:
        # A route that takes the requests of several dialects words what is wrong in that of the request.
        possible += [(NestedDialect(), failure) for failure in _possible(endpoint, has_parameters)]
    for dialect, failure in [*refused, *possible]:
        response = dialect.failure_response(failure, None)
        status = response.status_code
        if failure.message not in messages.setdefault(status, []):
            messages[status].append(failure.message)
        if failure.retry_after is not None:
            waits.add(status)
        if response.body:
            shape = msgspec.json.decode(response.body)
            schema = NestedError if isinstance(shape.get("error"), dict) else FlatError
            if schema not in shapes.setdefault(status, []):
                shapes[status].append(schema)
    for status, found in sorted(messages.items()):
        described: dict[str, Any] = {"description": "; ".join(found)}
        if status in shapes:
            described["content"] = {"application/json": {"schema": _schema(shapes[status], schemas)}}
        if status in waits:
            after = {"description": "seconds to wait", "schema": {"type": "integer", "minimum": 1}}
            described["headers"] = {"Retry-After": after}
        yield str(status), described


# What any connection may get, before it is known what it asks for.
_REFUSED = (
    Failure(Kind.invalid, "the request is not HTTP"),
    Failure(Kind.timeout, "the request did not come in time", status=408),
    Failure(Kind.too_large, "the head of the request is too large", status=431),
    Failure(Kind.unavailable, "there are too many connections", retry_after=1),
)


def _possible(endpoint: Endpoint, has_parameters: bool) -> Iterator[Failure]:
    yield Failure(Kind.internal, "the server failed")
    if endpoint.guarded:
        yield Failure(Kind.unauthorized, "the API key is missing or wrong")
    if endpoint.method == "POST":
        yield Failure(Kind.too_large, "the body is too large")
        yield Failure(Kind.timeout, "the body did not come in time", status=408)
    if endpoint.body is not None:
        yield Failure(Kind.invalid, "the request is not valid")
        yield Failure(Kind.unsupported_media, "the body is not JSON")
    if has_parameters or any("model" in _fields(body) for body in _several(endpoint.body)):
        yield Failure(Kind.not_found, "what is asked for does not exist")
    if not endpoint.guarded or endpoint.generates or endpoint.method == "POST":
        yield Failure(Kind.unavailable, "the engine does not answer, or the server is shutting down", retry_after=1)
    if endpoint.generates:
        yield Failure(Kind.overloaded, "there are too many requests", retry_after=1)
        yield Failure(Kind.queue_timeout, "the request waited too long", retry_after=1)
        yield Failure(Kind.timeout, "the request took too long")
        yield Failure(Kind.generation, "the generation failed")
