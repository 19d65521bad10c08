"""What /openapi.json and /docs say of a field of a request: its meaning, its default and its limits."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

__all__ = ["DEFAULT", "NOT_BUILT", "NotBuilt", "about", "not_built"]

# Keys beside those of JSON schema. A field's default in the schema is null, which stands for what is told here.
DEFAULT = "x-default"
NOT_BUILT = "x-not-built"


def about(meaning: str, default: str | None = None, **limits: float) -> Meta:
    """The documentation of a field, for ``Annotated``. It checks nothing: that is done where the field is read.

    ``default`` is what a field that is absent or null amounts to, in words; None where that is nothing. ``limits`` are
    keywords of JSON schema, such as ``minimum``.
    """
    schema: dict[str, Any] = dict(limits)
    if default is not None:
        schema[DEFAULT] = default
    return Meta(description=meaning, extra_json_schema=schema)


# For fields of other servers that are there so that the value which changes nothing is accepted, and any other refused
# by name.
not_built = Meta(
    description="not built: refused unless it has the value that changes nothing", extra_json_schema={NOT_BUILT: True}
)
NotBuilt = Annotated[Any, not_built]
