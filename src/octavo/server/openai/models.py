"""/v1/models and /v1/models/{id}: the names the model is served under, with its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from octavo.server.endpoints import json_response

if TYPE_CHECKING:
    from starlette.responses import Response

    from octavo.server.call import Call
    from octavo.server.serving import Serving

__all__ = ["ModelCard", "ModelList", "ModelPermission", "get_model", "list_models"]


class ModelPermission(Struct, kw_only=True):
    """What may be done with a model; clients of old versions of OpenAI's API look for it."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(Struct, kw_only=True):
    """A name to ask for.

    ``root`` is the model behind it, ``max_model_len`` the longest prompt plus answer in tokens, ``generation_config``
    what the model's files say of sampling: the defaults of requests that leave it open.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[ModelPermission]
    generation_config: dict[str, Any]


class ModelList(Struct, kw_only=True):
    """The answer of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


# Of a generation_config, what requests inherit.
_INHERITED = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")


def _card(serving: Serving, name: str) -> ModelCard:
    config = serving.service.generation_config
    return ModelCard(
        id=name,
        created=serving.created,
        root=serving.options.engine.model,
        max_model_len=serving.service.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{serving.created:x}", created=serving.created)],
        generation_config={field: config[field] for field in _INHERITED if config.get(field) is not None},
    )


async def list_models(call: Call) -> Response:
    """The handler of ``/v1/models``."""
    serving = call.serving
    return json_response(ModelList(data=[_card(serving, name) for name in serving.model_names]))


async def get_model(call: Call) -> Response:
    """The handler of ``/v1/models/{id}``; names may hold slashes."""
    name = call.serving.check_model(call.request.path_params["id"])
    return json_response(_card(call.serving, name))
