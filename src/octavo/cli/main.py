"""The entry point: puts the commands together and turns every failure into one line and an exit code."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

__all__ = ["main", "make_app"]

_COMMANDS = ("run", "serve", "chat", "pull", "plan", "bench", "tune", "build", "eval", "quantize")

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, what a shell reports for a command ended by Ctrl-C
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


def _show_version(wanted: bool) -> None:
    if wanted:
        import octavo

        typer.echo(f"octavo {octavo.__version__}")
        raise typer.Exit


def _global(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the full traceback of an error instead of one line.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Run large language models on this machine: ask, chat, serve, plan memory, measure."""


def make_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """The command line; with only the command that ``arguments`` name, when they do.

    Describing all commands takes longer than starting the one that is wanted.
    """
    app = typer.Typer(
        name="octavo",
        help="Run large language models on this machine: ask, chat, serve, plan memory, measure.",
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback()(_global)
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name in _COMMANDS if wanted not in _COMMANDS else (wanted,):
        importlib.import_module(f"octavo.cli.{name}").register(app)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors go to stderr as one line."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    # A start makes hundreds of thousands of objects that stay; commands that run on turn it on again (`settled`).
    collecting = gc.isenabled()
    gc.disable()
    # numpy starts a thread per core for products nobody asks it for here, and they look for work: 40 ms of a start.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _prepare_streams()
    try:
        code = _invoke(args)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    finally:
        if collecting:
            gc.enable()
    return code


def _prepare_streams() -> None:
    """Give closed standard streams a place to go, and have output its encoding lacks shown as question marks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open as long as the process
        elif mode == "w" and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _invoke(args: list[str]) -> int:
    try:
        result: Any = make_app(args)(args, prog_name="octavo", standalone_mode=False)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except SystemExit as stop:
        # typer ends the process itself when it meets a closed pipe.
        raise BrokenPipeError from stop
    except Exception as error:
        if _debug_wanted(args):
            raise
        return _report(error)
    return result if isinstance(result, int) else 0


def _debug_wanted(args: list[str]) -> bool:
    """Whether ``--debug`` was given before the command; asked of the raw arguments, as parsing may be what failed."""
    for argument in args:
        if argument == "--debug":
            return True
        if not argument.startswith("-"):
            break
    return False


def _report(error: Exception) -> int:
    """Print one line about ``error`` to stderr and give the exit code it stands for.

    A group called without a command is no mistake to explain: what is shown is its help, as written.
    """
    if type(error).__name__ == "NoArgsIsHelpError":  # typer has no public name for it
        print(str(error), file=sys.stderr)
        return EXIT_USAGE
    message, code = _explain(error)
    print(f"octavo: {' '.join(message.split())}", file=sys.stderr)
    return code


def _explain(error: Exception) -> tuple[str, int]:
    from octavo.errors import ConfigError, OctavoError, ParameterError

    usage = getattr(error, "format_message", None)
    if callable(usage):
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "octavo"
        message = str(usage()).replace("Value error, ", "").rstrip(".")
        return f"{message}; see {path} --help", EXIT_USAGE
    if isinstance(error, (ConfigError, ParameterError)):
        return str(error), EXIT_USAGE
    if isinstance(error, OctavoError):
        return str(error), EXIT_ERROR
    if isinstance(error, MemoryError):
        return "out of memory: lower --max-model-len or --memory-utilization, or use --quantization w4", EXIT_ERROR
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror or error}", EXIT_ERROR
    return f"internal error, {type(error).__name__}: {error}; octavo --debug COMMAND shows where", EXIT_ERROR


def _silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain about the closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)


if __name__ == "__main__":
    sys.exit(main())
