"""``octavo serve``: a model over HTTP. Its flags are the options of the engine and of the server, one for each."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from octavo.cli import options as opt
from octavo.cli.console import download_progress
from octavo.frontend.options import EngineOptions
from octavo.server.options import ENGINE_DEFAULTS, ServerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["register"]

_SHORT = {"quantization": "-q", "threads": "-t"}
# Headings of the help, by the option that each begins with.
_SECTIONS = {
    "host": "Address",
    "served_model_name": "Names, keys and browsers",
    "max_concurrent_requests": "Limits",
    "request_timeout": "Deadlines",
    "chat_template": "Chat",
    "engine_timeout": "When the engine hangs",
    "write_buffer_bytes": "Slow readers",
    "log_format": "Logs and traces",
    "tokenizer": "Engine",
    "help": "Help",
}
_HELP = {
    "seed": "seed of requests that bring none; default: from the system, another one at each start",
    "max_step_seconds": "about how long a step may take while answers are streamed, in seconds: prompts are then cut "
    "in smaller chunks",
}


class _Sectioned(TyperCommand):
    """A command whose many options stand under headings in its help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options in the order they are declared in."""
        sections: dict[str, list[tuple[str, str]]] = {}
        heading = "Arguments"
        for parameter in self.get_params(ctx):
            heading = _SECTIONS.get(parameter.name or "", heading)
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(heading, []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("serve", cls=_Sectioned, short_help="Serve a model over HTTP, and to browsers.")(_command())


def _serve(model: str, **settings: Any) -> int:
    """Serve a model over HTTP to clients of OpenAI, vLLM and Text Generation Inference, and to browsers."""
    from octavo.server.runner import run
    from octavo.weights.hub import resolve_model

    given = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    options = ServerOptions.from_kwargs(model=model, **given)
    with download_progress() as progress:
        path = resolve_model(model, progress=progress)
    named = options.served_model_name or (model,)
    options = replace(options, served_model_name=named, engine=replace(options.engine, model=str(path)))
    return run(options, report=_say)


def _say(text: str) -> None:
    print(text, flush=True)


def _command() -> Callable[..., int]:
    """The function as typer reads it: with a parameter for each option."""

    def serve(**settings: Any) -> int:
        return _serve(**settings)

    parameters = [
        inspect.Parameter(
            "model",
            inspect.Parameter.KEYWORD_ONLY,
            default=opt.DEFAULT_MODEL,
            annotation=Annotated[str, typer.Argument(help=opt.engine_help("model"))],
        ),
        *_parameters(ServerOptions, skip=("engine",)),
        *_parameters(EngineOptions, skip=("model",)),
    ]
    serve.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    serve.__annotations__ = {one.name: one.annotation for one in parameters}
    serve.__doc__ = _serve.__doc__
    return serve


def _parameters(options: type[Any], skip: tuple[str, ...]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(options)
    for item in fields(options):
        if item.name not in skip:
            yield _parameter(item, hints[item.name])


def _parameter(item: Field[Any], hint: Any) -> inspect.Parameter:
    default: Any = ENGINE_DEFAULTS.get(item.name, item.default)
    if default is MISSING:
        raise TypeError(f"{item.name} has no default, so it cannot be a flag")
    flag = f"--{item.name.replace('_', '-')}"
    names = [flag, *([_SHORT[item.name]] if item.name in _SHORT else [])]
    if hint is bool:
        names = [f"{flag}/--no-{flag[2:]}"]
    text = _HELP.get(item.name, str(item.metadata["doc"]))
    if hint is bool:
        text += f"; default: {'on' if default else 'off'}"
    help_text = f"{text[0].upper()}{text[1:]}."
    if isinstance(default, tuple):
        default = list(default)
    option = typer.Option(*names, help=help_text, show_default=hint is not bool and default not in (None, []))
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[_plain(hint), option]
    )


def _plain(hint: Any) -> Any:
    """A type that the command line can read; the options check the values."""
    origin = get_origin(hint)
    if origin is tuple:
        return list[str]
    if origin is Literal:
        return str
    if origin in (Union, types.UnionType):
        (kind,) = [_plain(one) for one in get_args(hint) if one is not type(None)]
        return kind | None
    return hint
