"""/docs: the routes, their fields, defaults and meanings as one page of HTML, made from the OpenAPI document."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from octavo.server.about import DEFAULT, NOT_BUILT
from octavo.server.endpoints import Endpoint, NestedDialect
from octavo.server.openapi import describe

if TYPE_CHECKING:
    from octavo.server.call import Call
    from octavo.server.serving import Serving

__all__ = ["endpoints", "render"]

_STYLE = """
:root {
  color-scheme: light dark;
  --paper: light-dark(#fbf9f5, #15161a); --sheet: light-dark(#ffffff, #1c1e23); --sunk: light-dark(#f3efe7, #101115);
  --ink: light-dark(#211e1a, #e8e5df); --soft: light-dark(#635c52, #a5a199); --rule: light-dark(#ddd6c9, #33363d);
  --accent: light-dark(#8a3324, #eb9b78); --second: light-dark(#2f5d7c, #86b4d4);
  --serif: "Iowan Old Style", "Palatino Linotype", Palatino, "URW Palladio L", "Book Antiqua", Georgia, serif;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", "DejaVu Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", "DejaVu Sans Mono", monospace;
}
html { font: 15px/1.5 var(--sans); background: var(--paper); color: var(--ink); }
body { max-width: 66rem; margin: 0 auto; padding: 1rem 1.5rem 4rem; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .25rem 1.1rem; padding-bottom: .9rem; }
header { border-bottom: 1px solid var(--rule); }
header nav { margin-left: auto; display: flex; gap: 1.1rem; }
h1 { font: italic 500 1.85rem/1 var(--serif); margin: 0; }
h2 { font: 600 1.2rem/1.3 var(--serif); margin: 2rem 0 .6rem; }
h3 { font: 600 .87rem/1.3 var(--sans); color: var(--soft); margin: 1.1rem 0 .2rem; }
p { margin: .4rem 0; max-width: 46rem; }
a { color: var(--accent); text-underline-offset: .2em; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
code { font: .92em var(--mono); }
.note { color: var(--soft); }
.routes { background: var(--sheet); border: 1px solid var(--rule); border-radius: 6px; }
details + details { border-top: 1px solid var(--rule); }
summary { cursor: pointer; padding: .45rem .9rem; display: flex; flex-wrap: wrap; gap: 0 .9rem; align-items: baseline; }
summary:hover { background: var(--sunk); }
summary::-webkit-details-marker { display: none; }
summary .path { min-width: 17rem; }
summary .note { flex: 1 1 16rem; }
summary::after { content: "+"; color: var(--soft); font-family: var(--mono); }
details[open] > summary::after { content: "\\2212"; }
.method { font: 600 .75rem/1.5 var(--mono); width: 2.9rem; color: var(--second); }
.method.post { color: var(--accent); }
details[open] > summary { background: var(--sunk); }
/* The links lead inside, as browsers then open what is closed around it. */
.inside { scroll-margin-top: 3.5rem; padding: .3rem .9rem 1rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .3rem 0 .6rem; font-size: .87rem; }
th { color: var(--soft); font-weight: 500; }
td, th { text-align: left; vertical-align: top; padding: .28rem .9rem .28rem 0; border-bottom: 1px solid var(--rule); }
td:last-child, th:last-child { padding-right: 0; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_PREFIX = "#/components/schemas/"
# The dialects in the order of the page.
_TITLES = {"openai": "OpenAI and vLLM", "tgi": "Text Generation Inference", "plain": "The server"}
_LIMITS = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "exclusiveMaximum": "below",
}
_LENGTHS = {"minLength": "at least", "maxLength": "at most", "maxItems": "at most"}


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
    title = escape(info["title"])
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: API reference</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        f'<header><h1>{title}</h1><span class="note">API reference, version {escape(info["version"])}</span>',
        '<nav><a href="/">Playground</a><a href="/openapi.json">openapi.json</a></nav></header>',
        f"<p>{_prose(info['description'])}</p>",
    ]
    groups: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            groups.setdefault(operation["tags"][0], []).append((path, method, operation))
    for name in sorted(groups, key=lambda name: (list(_TITLES).index(name) if name in _TITLES else len(_TITLES), name)):
        parts.append(f'<h2>{escape(_TITLES.get(name, name))}</h2><div class="routes">')
        for path, method, operation in groups[name]:
            parts.extend(_operation(path, method, operation, schemas))
        parts.append("</div>")
    parts.append('<h2>Objects</h2><div class="routes">')
    for name, schema in sorted(schemas.items()):
        note = _prose(str(schema.get("description", "")).split("\n\n")[0])
        parts.append(f'<details><summary><code class="path">{escape(name)}</code>')
        parts.append(f'<span class="note">{note}</span></summary><div class="inside" id="{escape(name)}">')
        parts.extend(_fields(schema, schemas))
        parts.append("</div></details>")
    parts.append("</div></body></html>")
    return "".join(parts)


def _operation(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield f'<details><summary><span class="method {method}">{method.upper()}</span>'
    yield f'<code class="path">{escape(path)}</code>'
    yield f'<span class="note">{_prose(operation["summary"])}</span></summary><div class="inside">'
    if not operation["security"]:
        yield '<p class="note">Needs no key.</p>'
    body = operation.get("requestBody")
    if body is not None:
        schema = body["content"]["application/json"]["schema"]
        for one in schema.get("anyOf", [schema]):
            yield f"<h3>Request: {_type(one, schemas)}</h3>"
            name = one.get("$ref", "").removeprefix(_PREFIX)
            if name:
                yield f"<p>{_prose(schemas[name].get('description', ''))}</p>"
                yield from _fields(schemas[name], schemas)
                for part in _parts(schemas[name]):
                    yield f'<h3><a href="#{escape(part)}">{escape(part)}</a></h3>'
                    yield from _fields(schemas[part], schemas)
    yield "<h3>Answers</h3><table><tr><th>status</th><th>when</th><th>body</th></tr>"
    for status, response in operation["responses"].items():
        shown = " or ".join(_content(media, one, schemas) for media, one in response.get("content", {}).items())
        yield f"<tr><td>{status}</td><td>{escape(response['description'])}</td><td>{shown or 'empty'}</td></tr>"
    yield "</table></div></details>"


def _parts(schema: dict[str, Any]) -> list[str]:
    """The objects that an object's own fields are made of."""
    return list(dict.fromkeys(re.findall(rf'"\$ref": "{_PREFIX}(\w+)"', json.dumps(schema))))


def _content(media: str, content: dict[str, Any], schemas: dict[str, Any]) -> str:
    if media == "application/json":
        return _type(content["schema"], schemas)
    return "server-sent events" if media == "text/event-stream" else escape(media)


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    """The fields of an object as a table; those that are not built in a sentence below."""
    properties = schema.get("properties", {})
    built = {name: field for name, field in properties.items() if NOT_BUILT not in field}
    if built:
        required = schema.get("required", ())
        yield "<table><tr><th>field</th><th>type and limits</th><th>default</th><th>meaning</th></tr>"
        for name, field in sorted(built.items(), key=lambda item: item[0] not in required):
            yield f"<tr><td><code>{escape(name)}</code></td><td>{_type(field, schemas)}</td>"
            yield f"<td>{_default(field, name in required)}</td><td>{_prose(field.get('description', ''))}</td></tr>"
        yield "</table>"
    if len(built) < len(properties):
        names = ", ".join(f"<code>{escape(name)}</code>" for name in properties if name not in built)
        yield f'<p class="note">Not built, and refused unless they have the value that changes nothing: {names}.</p>'


def _default(field: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    if DEFAULT in field:
        return _prose(field[DEFAULT])
    if field.get("default") is None:
        return '<span class="note">none</span>'
    return f"<code>{escape(json.dumps(field['default']))}</code>"


def _prose(text: str) -> str:
    """A sentence with ``words`` or `words` between backticks as code."""
    return re.sub(r"(`+)([^`]+)\1", r"<code>\2</code>", escape(text))


def _type(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """A JSON schema in a few words, with links to the types it names; null, the same as absent, is left out."""
    limits = [f"{words} {schema[key]:,}" for key, words in _LIMITS.items() if key in schema]
    limits += [f"({words} {schema[key]:,})" for key, words in _LENGTHS.items() if key in schema]
    return " ".join((_kind(schema, schemas), *limits))


def _kind(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_PREFIX)
        return f'<a href="#{escape(name)}">{escape(name)}</a>' if name in schemas else escape(name)
    if "anyOf" in schema:
        # A limit told of the whole is the narrower one.
        kinds = [{key: one[key] for key in one if key not in schema} for one in schema["anyOf"]]
        return " or ".join(_type(one, schemas) for one in kinds if one != {"type": "null"})
    if "enum" in schema:
        return ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"] if value is not None)
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    kind = schema.get("type", "any")
    if kind == "array" and isinstance(schema.get("items"), dict):
        items = _type(schema["items"], schemas)
        return (
            f"list of {items}s" if items in ("boolean", "integer", "number", "object", "string") else f"list of {items}"
        )
    names: list[Any] = kind if isinstance(kind, list) else [kind]
    return escape(" or ".join(str(one) for one in names if one != "null" or len(names) == 1))
