"""``/invocations``: one route for every kind of body, as Amazon SageMaker calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.server.openai.chat import chat
from octavo.server.openai.completions import completions
from octavo.server.tgi.dialect import invalid
from octavo.server.tgi.generate import compat_generate
from octavo.server.tgi.shapes import Shape, shape_of

if TYPE_CHECKING:
    from starlette.responses import Response

    from octavo.server.call import Call

__all__ = ["invocations"]

_HANDLERS = {Shape.generate: compat_generate, Shape.chat: chat, Shape.completion: completions}


async def invocations(call: Call) -> Response:
    """POST /invocations: answers as ``/``, ``/v1/chat/completions`` or ``/v1/completions`` would."""
    handler = _HANDLERS.get(shape_of(await call.body()))
    if handler is None:
        raise invalid("the body must be a JSON object with `inputs`, `messages` or `prompt`", "inputs")
    return await handler(call)
