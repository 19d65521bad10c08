"""Starts octavo, llama-server and vLLM's server in turn, loads each over HTTP alike, and prints what clients see.

    python benchmarks/serving.py --models DIR [--llama-server FILE] [--vllm-python FILE] [--rounds 3] [--loads c32]

The folder of models holds NAME (a Hugging Face directory with bf16 weights) and, for llama-server, NAME-Q4_0.gguf,
NAME-Q8_0.gguf and, with --all-forms, NAME-bf16.gguf made from it; a server whose files are missing is left out.
octavo's w4 runs NAME-Q4_1.gguf as stored where it is there, else the directory quantised while loading.

In each round every server is started anew, answers two requests that are not counted, gets every load once and is
stopped; the order of a round is the reverse of the one before, so that a slow spell of the machine hits all. Nothing
else may run meanwhile. The load generator (load_generator.py; its definitions hold here) runs on the same cores: its
processor time is recorded apart. Reported are medians over the rounds with their spread, and ratios of runs of the same
round. Memory is the greatest sum over a server's processes of what is resident; the front end's share is the processor
time of octavo's first process over that of all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from load_generator import LOADS, Load
from recording import RESULTS, command, dashed, model_sha256, peer_quality, provenance, recorded_quality, write
from server_process import OCTAVO, ServerProcess, cpu_seconds
from serving_report import COLUMNS, figure, middle, table, table_of_ratios

from octavo.errors import ParameterError
from octavo.frontend.options import EngineOptions

_HERE = Path(__file__).resolve().parent
_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
_VLLM_SHARE = 0.4  # of the machine's memory; what it calls GPU memory is the processor's there


@dataclass(frozen=True, slots=True)
class Server:
    """A server with its weights; ``runs`` collects the figures of each load, round by round."""

    name: str
    model: Path
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    starts: list[dict[str, float]] = field(default_factory=list)


def servers(options: argparse.Namespace) -> list[Server]:
    """Those whose programs and weights are there."""
    models, name = options.models, options.name
    found = list(_octavo(models, name, options.octavo))
    if options.vllm_python is not None:
        found.append(_vllm(models / name, options.vllm_python, options.threads))
    if options.llama_server is not None:
        forms = ("Q4_0", "Q8_0", "bf16") if options.all_forms else ("Q4_0", "Q8_0")
        found += _llama(models, name, options.llama_server, options.threads, forms)
    wanted = options.only.split(",")
    found = [server for server in found if any(text in server.name for text in wanted)]
    for server in found:
        if not server.model.exists():
            print(f"left out: {server.name} ({server.model.name} is missing)")
    return [server for server in found if server.model.exists()]


def _octavo(models: Path, name: str, program: Sequence[str]) -> list[Server]:
    q4_1 = models / f"{name}-Q4_1.gguf"
    forms: dict[str, str | None] = {"w4": None if q4_1.is_file() else "w4", "w8": "w8", "w8-wide": "w8-wide"}
    forms["bf16"] = "none"
    tail = ("--host", "127.0.0.1", "--port", "{port}", "--served-model-name", "m", "--max-model-len", "2048")
    found = []
    for title, form in forms.items():
        if form is not None and not _known(form):
            print(f"left out: octavo {title} (this octavo has no such form)")
            continue
        model, more = (q4_1, ()) if form is None else (models / name, ("--quantization", form))
        words = (*program, "serve", str(model), *more, *tail)
        found.append(Server(f"octavo {title}", model, words))
    return found


def _known(form: str) -> bool:
    try:
        EngineOptions.from_kwargs(quantization=form)
    except ParameterError:
        return False
    return True


def _llama(models: Path, name: str, program: Path, threads: int, forms: Sequence[str]) -> list[Server]:
    # GNU OpenMP's threads are erratic on few cores unless pinned, and every one of 32 slots needs its own context.
    mask = hex((1 << threads) - 1)
    tail = f"--host 127.0.0.1 --port {{port}} -t {threads} -np 32 -c 32768 -b 2048 -ub 512 --alias m -C {mask}".split()
    return [
        Server(f"llama-server {form}", file, (str(program), "-m", str(file), *tail, "--cpu-strict", "1"))
        for form in forms
        for file in (models / f"{name}-{form}.gguf",)
    ]


def _vllm(model: Path, python: Path, threads: int) -> Server:
    words = f"{python} -m vllm.entrypoints.openai.api_server --model {model} --host 127.0.0.1 --port {{port}}".split()
    words += (
        f"--served-model-name m --max-model-len 2048 --max-num-seqs 64 --gpu-memory-utilization {_VLLM_SHARE}".split()
    )
    # By default it leaves a core free; what it preloads is what its own documentation asks for on CPUs.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "4"}
    preload = [*Path("/usr/lib").glob("*-linux-gnu/libtcmalloc_minimal.so.4"), *_beside(python, "libiomp5.so")]
    if preload:
        environment["LD_PRELOAD"] = ":".join(map(str, preload))
    return Server("vllm bf16", model, tuple(words), environment)


def _beside(python: Path, library: str) -> list[Path]:
    return [file for file in (python.parent.parent / "lib" / library,) if file.exists()]


# --- running ----------------------------------------------------------------------------------------------------------


def measure(found: Sequence[Server], loads: Sequence[Load], rounds: int, seed: int, tokenizer: Path) -> None:
    """Start, load and stop every server once a round."""
    for number in range(rounds):
        for server in found if number % 2 == 0 else found[::-1]:
            with ServerProcess(server.command, environment={**_OFFLINE, **server.environment}) as process:
                peak = _PeakMemory(process)
                for load in loads:
                    done = _load(process, load, seed + number, tokenizer) | {"peak_rss_bytes": peak.so_far()}
                    if not server.name.startswith("octavo"):
                        del done["front_end_share"]  # of others it is not known which process does what
                    server.runs.setdefault(load.name, []).append(done)
                    cells = [(column, figure(done, column)) for column in COLUMNS]
                    shown = [
                        f"{column.title} {value:.{column.digits}f}" for column, value in cells if value is not None
                    ]
                    print(
                        f"round {number + 1}: {server.name} {load.name}: {', '.join(shown)}",
                        *done["errors"],
                        flush=True,
                    )
                server.starts.append({"start_s": process.start_seconds, "peak_rss_bytes": peak.stop()})


def _load(process: ServerProcess, load: Load, seed: int, tokenizer: Path) -> dict[str, Any]:
    words = [sys.executable, str(_HERE / "load_generator.py"), "--url", process.address.url, "--model", process.model]
    for name, value in asdict(load).items():
        if name != "name":
            words += ["--" + name.replace("_", "-"), str(value)]
    words += ["--seed", str(seed), "--tokenizer", str(tokenizer)]
    before = _split_cpu(process)
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    after = _split_cpu(process)
    if done.returncode:
        raise SystemExit(
            f"the load generator ended with {done.returncode}:\n{done.stderr[-2000:]}\n{process.log()[-2000:]}"
        )
    figures: dict[str, Any] = json.loads(done.stdout)
    first, others = (after[place] - before[place] for place in (0, 1))
    cores = len(os.sched_getaffinity(0))
    # The two requests that are not counted are in it too.
    share = first / (cores * figures["wall_s"])
    return figures | {"name": load.name, "server_cpu_s": first + others, "front_end_share": share}


def _split_cpu(process: ServerProcess) -> tuple[float, float]:
    """Processor seconds of a server's first process and of all below it."""
    tree = process.tree()
    return cpu_seconds(tree[:1]), cpu_seconds(tree[1:])


class _PeakMemory:
    """Samples the memory of a server's processes until stopped."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process
        self._peak = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(0.5):
            self._peak = max(self._peak, self._process.rss_bytes())

    def so_far(self) -> int:
        self._peak = max(self._peak, self._process.rss_bytes())
        return self._peak

    def stop(self) -> int:
        self._stopped.set()
        self._thread.join()
        return self.so_far()


# --- reporting --------------------------------------------------------------------------------------------------------


def _record(server: Server, digests: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model": server.model.name,
        "form": server.name.partition(" ")[2],
        "quality": _quality(server, digests),
        "command": command(server.command),
        "environment": {name: command(value.split(":")) for name, value in server.environment.items()},
        "start_s": statistics.median(start["start_s"] for start in server.starts),
        "peak_rss_bytes": max(start["peak_rss_bytes"] for start in server.starts),
        "loads": {name: {"median": _medians(runs), "rounds": runs} for name, runs in server.runs.items()},
    }


def _medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    return {column.title: None if (found := middle(runs, column)) is None else found[0] for column in COLUMNS}


def _quality(server: Server, digests: Mapping[str, str]) -> dict[str, Any]:
    """The recorded divergence of what the server runs, or why there is none."""
    engine, _, form = server.name.partition(" ")
    if engine != "octavo":
        return peer_quality({"llama-server": "llama.cpp"}.get(engine, engine), form)
    words = server.command
    asked = words[words.index("--quantization") + 1] if "--quantization" in words else None
    return recorded_quality(digests[server.model.name], asked)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True, help="folder of models")
    parser.add_argument("--name", default="smollm2-135m", help="the model's name in that folder")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server; without it that is left out")
    parser.add_argument(
        "--vllm-python", type=Path, help="Python of an environment with vLLM; without it that is left out"
    )
    parser.add_argument("--octavo", nargs="+", default=list(OCTAVO), help="octavo's command")
    parser.add_argument("--only", default="", help="run only the servers whose name holds one of these texts (commas)")
    parser.add_argument("--all-forms", action="store_true", help="run llama-server with bf16 weights too, its slowest")
    parser.add_argument("--loads", default="c32", help=f"which loads, separated by commas: {', '.join(LOADS)}")
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is run")
    parser.add_argument("--requests", type=int, help="requests of each load, in place of its own number (for a try)")
    parser.add_argument("--threads", type=int, default=2, help="cores that llama-server and vLLM are given")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--json", type=Path, help="file to write; else one in benchmarks/results")
    return parser.parse_args(argv)


def main() -> None:
    options = parse()
    found = servers(options)
    if not found:
        raise SystemExit("nothing to run: the folder of models lacks the files, or --only fits no server")
    loads = [LOADS[name] for name in options.loads.split(",")]
    if options.requests is not None:
        loads = [Load(**asdict(load) | {"requests": options.requests}) for load in loads]
    record = {"what": "servers side by side over HTTP", **provenance(["uvicorn", "starlette", "msgspec"])}
    measure(found, loads, options.rounds, options.seed, options.models / options.name)
    digests = {model.name: model_sha256(model) for model in sorted({server.model for server in found})}
    record |= {
        "rounds": options.rounds,
        "loads": [asdict(load) for load in loads],
        "models_sha256": digests,
        "peers": _peer_versions(options),
        "servers": {server.name: _record(server, digests) for server in found},
    }
    path = options.json or RESULTS / dashed(f"serving {options.name} {record['date'][:10]}.json")
    write(record, path)
    print(f"\nmilliseconds; medians of {options.rounds} rounds")
    for load in loads:
        runs = {server.name: server.runs[load.name] for server in found}
        print(f"\n{load.name}\n{table(runs)}\n\n{table_of_ratios(runs)}")
    print(f"\nwritten to {path}")


def _peer_versions(options: argparse.Namespace) -> dict[str, str]:
    """What the other servers say of themselves."""
    found = {}
    if options.llama_server is not None:
        done = subprocess.run([options.llama_server, "--version"], capture_output=True, text=True, check=False)
        lines = (done.stdout + done.stderr).splitlines()
        found["llama-server"] = next((line for line in lines if line.startswith("version")), "unknown")
    if options.vllm_python is not None:
        code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
        done = subprocess.run([options.vllm_python, "-c", code], capture_output=True, text=True, check=False)
        found["vllm"] = done.stdout.strip() or "unknown"
    return found


if __name__ == "__main__":
    main()
