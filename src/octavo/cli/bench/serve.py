"""``octavo bench serve``: loads any OpenAI-compatible or TGI server by its URL, alone or several in turns."""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from octavo.benchmarking.options import BenchOptions
from octavo.benchmarking.scenarios import SCENARIOS
from octavo.cli.console import download_progress, remark, settled
from octavo.errors import ConfigError
from octavo.frontend.options import DEFAULT_MODEL

if TYPE_CHECKING:
    from octavo.benchmarking.comparison import Level
    from octavo.benchmarking.session import Server
    from octavo.benchmarking.workload import WordSource

__all__ = ["register"]

_LIMIT = re.compile(r"(ttft|tpot|e2el):[0-9.]+")
_REPORT = "octavo-bench.html"

# The options of the command itself: annotation and default by name; what is measured is in BenchOptions.
_OWN: dict[str, tuple[Any, Any]] = {
    "more": (
        Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[URL=NAME | METRIC:MS]...", help="Further servers of --compare, limits of --goodput."
            ),
        ],
        None,
    ),
    "base_url": (
        Annotated[str | None, typer.Option("--base-url", help="URL of the server; default: made of host and port.")],
        None,
    ),
    "host": (Annotated[str, typer.Option("--host", help="Where the server is.")], "127.0.0.1"),
    "port": (Annotated[int, typer.Option("--port", min=1, max=65535, help="Its port.")], 8000),
    "compare": (
        Annotated[
            list[str] | None,
            typer.Option("--compare", metavar="URL[=NAME]", help="Servers to measure in turns on the same work."),
        ],
        None,
    ),
    "rounds": (
        Annotated[
            int | None,
            typer.Option(
                "--rounds", min=1, help="How often, with other work each time; default: 5 with --compare, else 1."
            ),
        ],
        None,
    ),
    "sweep": (
        Annotated[
            str | None,
            typer.Option("--sweep", help="Several values of --max-concurrency, such as 1,2,4,8; default: that one."),
        ],
        None,
    ),
    "sweep_rate": (
        Annotated[
            str | None,
            typer.Option("--sweep-rate", help="Several values of --request-rate, such as 1,2,inf; default: that one."),
        ],
        None,
    ),
    "report": (
        Annotated[
            Path | None,
            typer.Option("--report", help=f"HTML file with plots to write; default: {_REPORT} with --compare."),
        ],
        None,
    ),
    "scenario": (
        Annotated[
            Literal["chat", "rag", "batch", "long-context", "agents", "voice"] | None,
            typer.Option(
                "--scenario", help="Options that stand for a use, each of which can be given otherwise; default: none."
            ),
        ],
        None,
    ),
    "progress": (
        Annotated[bool, typer.Option("--progress/--no-progress", help="Show how far a run is, on a terminal.")],
        True,
    ),
    "disable_tqdm": (Annotated[bool, typer.Option("--disable-tqdm", help="The same as --no-progress.")], False),
    "json": (
        Annotated[bool, typer.Option("--json", help="Print the whole record as JSON, not the block of text.")],
        False,
    ),
}


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("serve")(_command())


def _command() -> Callable[..., int]:
    """The function as typer reads it: its own options, then one for each field of BenchOptions."""

    def serve(**given: Any) -> int:
        own = {name: given.pop(name) for name in _OWN}
        return _serve(own, {name: value for name, value in given.items() if value not in (None, [], ())})

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, default=default, annotation=annotation)
        for name, (annotation, default) in _OWN.items()
    ]
    hints = get_type_hints(BenchOptions)
    parameters += [_parameter(item, hints[item.name]) for item in fields(BenchOptions)]
    serve.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    serve.__annotations__ = {one.name: one.annotation for one in parameters}
    serve.__doc__ = "A server over HTTP, as its clients see it: TTFT, ITL, TPOT, E2EL, requests and tokens a second."
    return serve


def _parameter(item: Field[Any], hint: Any) -> inspect.Parameter:
    """A flag for a field. What is not given is None, so that a scenario can tell."""
    many = get_origin(hint) is tuple
    kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
    kind = kinds[0] if many or get_origin(hint) in (Union, types.UnionType) else hint
    flag = "--" + item.name.replace("_", "-")
    if kind is bool and item.default:
        flag = f"{flag}/--no-{flag[2:]}"
    text = item.metadata["help"]
    shown = item.default not in (None, ()) and not isinstance(item.default, bool)
    # The name of a data set or of a value stays as it is typed.
    if not text.partition(" ")[0].endswith(":"):
        text = f"{text[0].upper()}{text[1:]}"
    help_text = f"{text}{f' [default: {item.default}]' if shown else '.'}"
    choices = item.metadata.get("choices")
    base = Literal[choices] if choices else kind
    option = typer.Option(flag, help=help_text, envvar=item.metadata.get("envvar"), show_default=False)
    annotation = Annotated[list[base] | None if many else base | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _serve(own: Mapping[str, Any], given: dict[str, Any]) -> int:
    targets, limits = _sorted_out(own["more"] or (), compares=bool(own["compare"]), limited="goodput" in given)
    if limits:
        given["goodput"] = [*given.get("goodput", ()), *limits]
    preset = SCENARIOS[own["scenario"]].options if own["scenario"] else {}
    settings = {**preset, **given}
    chosen: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}
    options = BenchOptions(**chosen)
    named = _named([*(own["compare"] or ()), *targets])
    levels = _levels(own)
    if named and own["base_url"] is not None:
        raise ConfigError("--base-url and --compare exclude each other: name every server after --compare")
    servers = named or [("server", own["base_url"] or f"http://{own['host']}:{own['port']}")]
    rounds = own["rounds"] or (5 if named else 1)
    run = _Command(options, own, servers)
    if named or rounds > 1 or own["sweep"] or own["sweep_rate"] or own["report"] is not None:
        return run.compare(rounds, levels)
    return run.once()


def _sorted_out(words: Sequence[str], *, compares: bool, limited: bool) -> tuple[list[str], list[str]]:
    """Words without an option before them: what follows the first after --compare or --goodput, as vLLM takes it."""
    targets = [word for word in words if "://" in word]
    limits = [word for word in words if _LIMIT.fullmatch(word)]
    for word in words:
        fits = (word in targets and compares) or (word in limits and limited)
        if not fits:
            raise ConfigError(f"{word!r} belongs to no option: servers follow --compare, limits --goodput")
    return targets, limits


def _named(words: Sequence[str]) -> list[tuple[str, str]]:
    """Name and URL of each server; a name not given is the host and port."""
    found: list[tuple[str, str]] = []
    for word in words:
        url, equals, name = word.partition("=")
        name = name if equals else url.partition("://")[2].rstrip("/") or url
        if name in (known for known, _ in found):
            raise ConfigError(f"two servers have the name {name!r}: give each its own, URL=NAME")
        found.append((name, url))
    return found


def _levels(own: Mapping[str, Any]) -> list[Level]:
    from octavo.benchmarking.comparison import Level

    if own["sweep"] and own["sweep_rate"]:
        raise ConfigError("--sweep and --sweep-rate exclude each other")
    try:
        if own["sweep"]:
            limits = [int(word) for word in own["sweep"].replace(",", " ").split()]
            return [Level(f"concurrency {limit}", {"max_concurrency": limit}) for limit in limits]
        if own["sweep_rate"]:
            rates = [float(word) for word in own["sweep_rate"].replace(",", " ").split()]
            return [Level(f"{rate:g} requests/s", {"request_rate": rate}) for rate in rates]
    except ValueError as error:
        raise ConfigError(f"--sweep and --sweep-rate take numbers separated by commas: {error}") from error
    return [Level("load")]


class _Command:
    """One call of the command: the servers looked up, the tokenizer found, results printed and kept."""

    def __init__(self, options: BenchOptions, own: Mapping[str, Any], servers: Sequence[tuple[str, str]]) -> None:
        self.options = options
        self.progress = bool(own["progress"]) and not own["disable_tqdm"]
        self.as_json = bool(own["json"])
        self.report: Path | None = own["report"]
        self.named = servers

    def once(self) -> int:
        """Measure one server once."""
        from octavo.benchmarking.record import provenance
        from octavo.benchmarking.results import result_path, save
        from octavo.benchmarking.session import look_up, measure
        from octavo.benchmarking.text import result_text

        async def run() -> tuple[Server, dict[str, Any]]:
            ((name, url),) = self.named
            server = await look_up(name, url, self.options)
            words, tokenizer_id = self.words([server])
            run = await measure(server, self.options, words, tokenizer_id=tokenizer_id, progress=self.progress)
            return server, run.result

        _, result = _run(run)
        about = provenance()
        result = {**result, "benchmark": "serve", **about, "date": result["date"], "recorded": about["date"]}
        _warn(result)
        if self.as_json:
            _print_json(result)
        else:
            print(result_text(result, metrics=self.options.metrics, percentiles=self.options.percentiles))
        if self.options.save_result or self.options.save_detailed or self.options.append_result:
            path = result_path(self.options, result)
            save(result, path, append=self.options.append_result)
            remark(f"written to {path}")
        return 0 if result["completed"] else 1

    def compare(self, rounds: int, levels: Sequence[Level]) -> int:
        """Measure the servers in turns; write the report and print the ratios."""
        from octavo.benchmarking.comparison import Comparison, compare, ratio_table
        from octavo.benchmarking.record import provenance
        from octavo.benchmarking.report import comparison_record, comparison_report
        from octavo.benchmarking.results import save
        from octavo.benchmarking.session import look_up

        async def run() -> Comparison:
            servers = [await look_up(name, url, self.options) for name, url in self.named]
            words, tokenizer_id = self.words(servers)
            return await compare(
                servers,
                self.options,
                words,
                tokenizer_id=tokenizer_id,
                rounds=rounds,
                levels=levels,
                progress=self.progress,
                tell=remark,
            )

        comparison = _run(run)
        about = provenance()
        record = comparison_record(comparison, about)
        for sample in comparison.samples:
            _warn(sample.result, sample.server)
        print(ratio_table(comparison)) if not self.as_json else _print_json(record)
        folder = Path(self.options.result_dir or ".")
        page = self.report if self.report is not None else folder / _REPORT
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(comparison_report(comparison, about, title=" / ".join(comparison.servers)), encoding="utf-8")
        remark(f"written to {page}")
        if self.options.save_result or self.options.save_detailed or self.options.append_result:
            path = folder / (self.options.result_filename or page.with_suffix(".json").name)
            save(record, path, append=self.options.append_result)
            remark(f"written to {path}")
        return 0 if all(sample.result["completed"] for sample in comparison.samples) else 1

    def words(self, servers: Sequence[Server]) -> tuple[WordSource, str]:
        """What makes and counts texts: the tokenizer asked for, the first served model's if it is here, or octavo's."""
        from octavo.benchmarking.session import local_root
        from octavo.benchmarking.workload import WordSource
        from octavo.frontend.tokenizer import load_tokenizer
        from octavo.weights.hub import resolve_model

        here = self.options.model if self.options.model and Path(self.options.model).exists() else None
        name = self.options.tokenizer or here or next(filter(None, map(local_root, servers)), None)
        if name is None:
            name = DEFAULT_MODEL
            remark(f"lengths are counted with the tokenizer of {name}: give --tokenizer for the model's own")
        with download_progress() as progress:
            path = resolve_model(name, progress=progress)
        return WordSource(load_tokenizer(path)), Path(name).name


def _run(make: Callable[[], Any]) -> Any:
    import asyncio

    settled()
    try:
        import uvloop
    except ImportError:  # not on every system
        return asyncio.run(make())
    return uvloop.run(make())


def _warn(result: Mapping[str, Any], name: str = "") -> None:
    """Say what makes figures doubtful."""
    start = f"{name}: " if name else ""
    for error in result.get("distinct_errors", ()):
        remark(f"{start}failed: {error}")
    if result["client_cpu_share"] > 0.5:
        remark(
            f"{start}this client used {100 * result['client_cpu_share']:.0f} % of a core: it may be what was measured"
        )
    told, counted = result["total_input_tokens"], result.get("server_input_tokens")
    plain = result["backend"] in ("openai", "vllm", "tgi")
    if counted is not None and plain and told and not math.isclose(told, counted, rel_tol=0.05):
        remark(f"{start}the server counts {counted} prompt tokens where {told} were meant: its tokenizer is another")


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=1, ensure_ascii=False))
