"""/docs: the routes, their fields, defaults and meanings as one page of HTML, made from the OpenAPI document."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from octavo.server.endpoints import Endpoint, NestedDialect
from octavo.server.openapi import describe

if TYPE_CHECKING:
    from octavo.server.call import Call
    from octavo.server.serving import Serving

__all__ = ["endpoints", "render"]

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
summary { cursor: pointer; padding: .25rem 0; } code { font-family: ui-monospace, monospace; }
.method { display: inline-block; width: 4.2rem; font-weight: 700; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem; font-size: .9rem; }
td, th { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid #8884; }
.note { opacity: .75; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_PREFIX = "#/components/schemas/"


def endpoints(serving: Serving, others: Sequence[Endpoint]) -> list[Endpoint]:
    """The route of the page, which describes itself too."""
    described = list(others)

    @cache
    def page() -> str:
        return render(describe(described, serving.version))

    async def answer(call: Call) -> Response:
        return Response(page(), headers=_HEADERS, media_type="text/html")

    own = Endpoint(
        method="GET", path="/docs", handler=answer, dialect=NestedDialect(), summary="This page", answer="text/html"
    )
    described.append(own)
    return [own]


def render(document: dict[str, Any]) -> str:
    """An OpenAPI document as a page without scripts."""
    schemas = document["components"]["schemas"]
    info = document["info"]
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])} ",
        'For programs: <a href="/openapi.json">/openapi.json</a>.</p>',
    ]
    groups: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append((path, method, operation))
    for name, operations in sorted(groups.items()):
        parts.append(f"<h2>{escape(name)}</h2>")
        for path, method, operation in operations:
            parts.extend(_operation(path, method, operation, schemas))
    parts.append("<h2>types</h2>")
    for name, schema in sorted(schemas.items()):
        parts.append(f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>')
        parts.extend(_fields(schema))
        parts.append("</details>")
    parts.append("</body></html>")
    return "".join(parts)


def _operation(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield f'<details><summary><code><span class="method">{method.upper()}</span>{escape(path)}</code> '
    yield f'<span class="note">{escape(operation["summary"])}</span></summary>'
    if not operation["security"]:
        yield '<p class="note">Needs no key.</p>'
    body = operation.get("requestBody")
    if body is not None:
        schema = body["content"]["application/json"]["schema"]
        yield f"<p>Body: {_type(schema)}</p>"
        for one in schema.get("anyOf", [schema]):
            name = one.get("$ref", "").removeprefix(_PREFIX)
            if name:
                yield from _fields(schemas[name])
    yield "<table><tr><th>status</th><th>answer</th><th></th></tr>"
    for status, response in operation["responses"].items():
        content = response.get("content", {})
        shown = "<br>".join(
            f"{escape(media)}: {_type(one.get('schema', {'type': 'events'}))}" for media, one in content.items()
        )
        yield f"<tr><td>{status}</td><td>{shown or 'empty'}</td><td>{escape(response['description'])}</td></tr>"
    yield "</table></details>"


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    if "description" in schema:
        yield f"<p>{escape(schema['description'])}</p>"
    properties = schema.get("properties")
    if not properties:
        return
    required = schema.get("required", ())
    yield "<table><tr><th>field</th><th>type</th><th>default</th><th>meaning</th></tr>"
    for name, field in properties.items():
        if name in required:
            default = "required"
        elif "default" in field:
            default = f"<code>{escape(json.dumps(field['default']))}</code>"
        else:
            default = "absent"
        yield f"<tr><td><code>{escape(name)}</code></td><td>{_type(field)}</td><td>{default}</td>"
        yield f"<td>{escape(field.get('description', ''))}</td></tr>"
    yield "</table>"


def _type(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words, with links to the types it names."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_PREFIX))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    kind = schema.get("type", "any")
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"list of {_type(schema['items'])}"
    bounds = [
        f"{words} {schema[key]}"
        for key, words in (
            ("minimum", "at least"),
            ("maximum", "at most"),
            ("exclusiveMinimum", "above"),
            ("exclusiveMaximum", "below"),
            ("minLength", "length at least"),
            ("maxLength", "length at most"),
        )
        if key in schema
    ]
    return escape(" or ".join(kind) if isinstance(kind, list) else str(kind)) + escape(
        f" ({', '.join(bounds)})" if bounds else ""
    )
