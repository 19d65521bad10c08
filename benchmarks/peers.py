"""Measures octavo and llama.cpp in turn on one machine, each weight form of octavo against its like.

    python benchmarks/peers.py --llama-bin DIR --models DIR [--name smollm2-135m] [--rounds 5]

The folder of models holds NAME (a Hugging Face directory with bf16 weights) and, for llama.cpp, NAME-bf16.gguf,
NAME-Q8_0.gguf, NAME-Q4_1.gguf and NAME-Q4_0.gguf made from it; a pair whose files are missing is left out. octavo's w4
runs NAME-Q4_1.gguf as stored where it is there, else the directory quantised while loading.

Every run is a fresh process. The two engines take turns, and who comes first changes from round to round, so that a
slow spell of the machine hits both. Reported are medians over the rounds and their ratio, pair by pair. Nothing else
may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recording import RESULTS, command, dashed, model_sha256, provenance, write

from octavo.planning.hardware import probe

# GNU OpenMP, which llama.cpp uses, is erratic on few cores unless its threads are pinned.
_PINNED = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Case:
    """One workload, in the words of both engines.

    ``figures`` are what octavo reports, the first being the rate that is compared; ``read_llama`` makes the same of a
    line of llama.cpp's output.
    """

    name: str
    figures: tuple[str, ...]
    octavo: str
    llama: str
    read_llama: Callable[[dict[str, Any]], Figures]

    @property
    def rate(self) -> str:
        return self.figures[0]


@dataclass(frozen=True, slots=True)
class Form:
    """A model as one engine runs it."""

    name: str
    model: Path
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """A workload, octavo's weight form and the peer's; and what each round measured."""

    case: Case
    ours: Form
    theirs: Form
    octavo: list[Figures] = field(default_factory=list)
    llama: list[Figures] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.case.name}, octavo {self.ours.name} / llama.cpp {self.theirs.name}"

    def summary(self) -> dict[str, Any]:
        ours, theirs = _medians(self.octavo), _medians(self.llama)
        return {
            "case": self.case.name,
            "octavo_form": self.ours.name,
            "llama_form": self.theirs.name,
            "rate": self.case.rate,
            "octavo": ours,
            "llama": theirs,
            "ratio": ours[self.case.rate] / theirs[self.case.rate],
            "octavo_rounds": self.octavo,
            "llama_rounds": self.llama,
        }


def _medians(rounds: Sequence[Figures]) -> dict[str, float]:
    return {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}


# --- what is run ------------------------------------------------------------------------------------------------------


def _decode_rate(line: dict[str, Any]) -> Figures:
    return {"decode_tok_s": float(line["avg_ts"])}


def _prefill_rate(line: dict[str, Any]) -> Figures:
    return {"prefill_tok_s": float(line["avg_ts"])}


def _batch_rates(line: dict[str, Any]) -> Figures:
    seconds = float(line["t"])
    prompt, output = line["pl"] * line["pp"], line["pl"] * line["tg"]
    return {"wall_s": seconds, "output_tok_s": output / seconds, "total_tok_s": (prompt + output) / seconds}


def cases(requests: int) -> list[Case]:
    """One stream's decoding, one long prompt, and ``requests`` requests at once."""
    return [
        Case(
            "decode 128 after 128",
            ("decode_tok_s",),
            "latency --input-len 128 --output-len 128",
            "llama-bench -p 0 -n 128 -d 128 -r 1 -o jsonl",
            _decode_rate,
        ),
        Case(
            "prefill 1024",
            ("prefill_tok_s",),
            "prefill --input-len 1024",
            "llama-bench -p 1024 -n 0 -r 1 -o jsonl",
            _prefill_rate,
        ),
        Case(
            f"{requests} requests of 256 in and 64 out",
            ("total_tok_s", "output_tok_s", "wall_s"),
            f"throughput --num-prompts {requests} --max-num-seqs {requests} --input-len 256 --output-len 64",
            f"llama-batched-bench -c {requests * 320} -b 2048 -ub 512 -npp 256 -ntg 64 -npl {requests} "
            "--output-format jsonl",
            _batch_rates,
        ),
    ]


def forms(models: Path, name: str) -> Iterator[tuple[Form, Form]]:
    """octavo's forms with the forms of llama.cpp that hold as many bits; those whose files are there."""
    directory = models / name
    q4_1 = models / f"{name}-Q4_1.gguf"
    w4 = Form("w4", q4_1) if q4_1.is_file() else Form("w4", directory, ("--quantization", "w4"))
    w8 = Form("w8", directory, ("--quantization", "w8"))
    bf16 = Form("bf16", directory, ("--quantization", "none"))
    for ours, theirs in ((w4, "Q4_0"), (w4, "Q4_1"), (w8, "Q8_0"), (bf16, "bf16")):
        file = models / f"{name}-{theirs}.gguf"
        if file.is_file() and ours.model.exists():
            yield ours, Form(theirs, file)
        else:
            print(f"left out: octavo {ours.name} / llama.cpp {theirs} ({file.name} or {ours.model.name} is missing)")


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Runner:
    """Starts both engines; keeps the command lines, and what llama.cpp says of its build."""

    octavo: tuple[str, ...]
    llama_bin: Path
    threads: int
    commands: set[str] = field(default_factory=set)
    builds: set[str] = field(default_factory=set)

    def run_octavo(self, pair: Pair) -> Figures:
        kind, *options = pair.case.octavo.split()
        model = ("--model", str(pair.ours.model), *pair.ours.options)
        words = [
            *self.octavo,
            "bench",
            kind,
            *model,
            *options,
            "--rounds",
            "1",
            "--threads",
            str(self.threads),
            "--json",
        ]
        record = json.loads(self._run(words, {}))
        return {name: float(record[name]) for name in pair.case.figures}

    def run_llama(self, pair: Pair) -> Figures:
        program, *options = pair.case.llama.split()
        words = [str(self.llama_bin / program), "-m", str(pair.theirs.model), *options, "-t", str(self.threads)]
        lines = [line for line in self._run(words, _PINNED).splitlines() if line.startswith("{")]
        record = json.loads(lines[-1])
        if "build_commit" in record:
            self.builds.add(f"{record['build_commit']} ({record['build_number']})")
        return pair.case.read_llama(record)

    def _run(self, words: list[str], environment: Mapping[str, str]) -> str:
        self.commands.add(command(words))
        done = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{command(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return done.stdout


def measure(runner: Runner, pairs: Sequence[Pair], rounds: int) -> None:
    """Run every pair once a round. A form that stands in several pairs is run once for each: neighbours in time."""
    for number in range(rounds):
        for pair in pairs:
            sides = [(pair.octavo, runner.run_octavo), (pair.llama, runner.run_llama)]
            for figures, run in sides if number % 2 == 0 else reversed(sides):
                figures.append(run(pair))
            ours, theirs = pair.octavo[-1][pair.case.rate], pair.llama[-1][pair.case.rate]
            print(f"round {number + 1}: {pair.name}: {ours:.1f} / {theirs:.1f} tokens/s", flush=True)


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """The medians and their ratio as lines of text."""
    lines = [f"{'':36} {'octavo':>16} {'llama.cpp':>18} {'ratio':>7}"]
    for row in summaries:
        ours, theirs = (f"{row[side + '_form']} {row[side][row['rate']]:8.1f}" for side in ("octavo", "llama"))
        lines.append(f"{row['case']:36} {ours:>16} {theirs:>18} {row['ratio']:6.2f}x")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--llama-bin", type=Path, required=True, help="folder of llama-bench and llama-batched-bench")
    parser.add_argument("--models", type=Path, required=True, help="folder of models")
    parser.add_argument("--name", default="smollm2-135m", help="the model's name in that folder")
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is run")
    parser.add_argument("--requests", type=int, default=64, help="requests of the batch")
    parser.add_argument("--threads", type=int, default=probe().default_threads, help="threads of both engines")
    parser.add_argument("--only", default="", help="run only the pairs whose name holds this text")
    parser.add_argument(
        "--octavo", nargs="+", default=[sys.executable, "-m", "octavo.cli.main"], help="octavo's command"
    )
    parser.add_argument("--json", type=Path, help="file to write; else one in benchmarks/results")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    matched = list(forms(arguments.models, arguments.name))
    pairs = [Pair(case, ours, theirs) for case in cases(arguments.requests) for ours, theirs in matched]
    pairs = [pair for pair in pairs if arguments.only in pair.name]
    if not pairs:
        raise SystemExit("nothing to run: the folder of models lacks the files, or --only fits no pair")
    record = {"what": "octavo and llama.cpp, interleaved", **provenance(["numpy"])}
    runner = Runner(tuple(arguments.octavo), arguments.llama_bin, arguments.threads)
    measure(runner, pairs, arguments.rounds)
    summaries = [pair.summary() for pair in pairs]
    models = sorted({form.model for pair in pairs for form in (pair.ours, pair.theirs)})
    record |= {
        "llama_cpp_build": sorted(runner.builds),
        "llama_cpp_environment": _PINNED,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "models_sha256": {model.name: model_sha256(model) for model in models},
        "commands": sorted(runner.commands),
        "pairs": summaries,
    }
    path = arguments.json or RESULTS / dashed(f"peers {arguments.name} {record['date'][:10]}.json")
    write(record, path)
    print(f"\n{table(summaries)}\n\nwritten to {path}")


if __name__ == "__main__":
    main()
