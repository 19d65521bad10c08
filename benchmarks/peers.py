"""Measures octavo beside llama.cpp, OpenVINO GenAI and vLLM on one machine, on all offline work of the comparison.

    python benchmarks/peers.py --models DIR [--llama-bin DIR] [--llama-avx2-bin DIR] [--openvino-python FILE]
        [--vllm-python FILE] [--stored FILE] [--only TEXT,TEXT] [--rounds 5] [--long-rounds 3]

The folder of models holds NAME (a Hugging Face directory with bf16 weights) and what is made of it: for llama.cpp
NAME-bf16.gguf, NAME-Q8_0.gguf, NAME-Q4_1.gguf, NAME-Q4_0.gguf; for OpenVINO the folders NAME-ov-fp16, NAME-ov-int8 and
NAME-ov-int4. What is missing is left out, and so is a peer whose program is not named. octavo's w4 runs NAME-Q4_1.gguf
as it is stored, or --stored.

Every run is a fresh process, except vLLM's, which takes a minute to start and lives as long as a group of work lasts.
All engines get the same prompts (llama.cpp's own benchmarks take as many random tokens); the forms take turns, from the
first to the last in one round and back in the next, so that a slow spell of the machine hits all. A peer that on some
work has less than --hopeless of the best peer of its class is not run on it again, nor at all if it had so little in an
earlier record (--known). Reported are medians and quartiles, the ratio to the best peer of the class, of all, and what
the machine's bandwidth and peaks allow. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers_cases import GROUPS, Group, Row, Words, measure
from peers_engines import Engines, Form, Worker, forms
from peers_report import Measured, compare, html, markdown
from peers_roofline import Machine, Shape, limit
from recording import RESULTS, command, dashed, model_sha256, peer_quality, provenance, recorded_quality, write

from octavo.frontend.tokenizer import load_tokenizer
from octavo.planning.hardware import probe
from octavo.weights.checkpoint import open_checkpoint

_SLOW_START = "vllm"
_START_SECONDS = 90  # of vLLM, for the estimate


@dataclass(slots=True)
class Session:
    """One run of this program: what is measured on what, and the figures so far."""

    engines: Engines
    words: Words
    groups: list[tuple[Group, list[Form]]]
    rounds: int
    long_rounds: int
    hopeless: float
    values: dict[tuple[str, Form], list[float]] = field(default_factory=dict)  # by row
    about: dict[Form, dict[str, Any]] = field(default_factory=dict)
    commands: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    known: Mapping[tuple[str, str], float] = field(default_factory=dict)  # by row and form, of an earlier record
    _kept: dict[Form, Worker] = field(default_factory=dict)

    def rounds_of(self, group: Group) -> int:
        return self.rounds if group.quick else self.long_rounds

    def estimate(self) -> float:
        """Seconds that everything takes, if nobody is dropped but by the earlier record."""
        total = 30.0
        for group, found in self.groups:
            for form in found:
                rows = [row for row in group.rows if not row.steady]
                share = sum(self._has_a_chance(row, form, found, 0) for row in rows) / len(rows)
                total += self.rounds_of(group) * group.seconds[form.engine] * share
        slow = {form for _, found in self.groups for form in found if form.engine == _SLOW_START}
        return total + _START_SECONDS * len(slow)

    def run(self) -> None:
        """All groups one after another, all rounds of each."""
        began = time.monotonic()
        total = self.estimate()
        print(f"{len(self.groups)} groups of work, about {total / 60:.0f} minutes at most", flush=True)
        try:
            for group, found in self.groups:
                self._group(group, found)
                self._close({form for later, rest in self.groups if later is not group for form in rest})
                print(f"--- {group.key} done after {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
        finally:
            self._close(set())

    def _group(self, group: Group, found: Sequence[Form]) -> None:
        for number in range(self.rounds_of(group)):
            for form in found if number % 2 == 0 else reversed(found):
                rows = [row.key for row in group.rows if self._has_a_chance(row, form, found, number)]
                if rows and rows != [row.key for row in group.rows if row.steady]:
                    self._once(group, form, number, rows)

    def _once(self, group: Group, form: Form, number: int, rows: Sequence[str]) -> None:
        try:
            figures = measure(
                group,
                form,
                self.engines,
                self.words,
                f"{group.key} {number}",
                rows=rows,
                worker=self._worker,
                log=self.commands,
            )
        except RuntimeError as error:
            self.failures.append(f"{group.key}, {form.title}: {error}")
            print(f"round {number + 1}: {form.title}: {error}", flush=True)
            return
        for row, value in figures.items():
            self.values.setdefault((row, form), []).append(value)
        shown = ", ".join(f"{row} {value:,.4g}" for row, value in figures.items())
        print(f"round {number + 1}: {form.title}: {shown}", flush=True)

    def _worker(self, form: Form) -> tuple[Worker, bool]:
        """A started engine, and whether it is to be closed after this work."""
        worker = self._kept.get(form)
        if worker is None:
            worker = Worker(form, self.engines)
            self.about[form] = worker.about
            self.commands.add(command(worker.command))
            if form.engine == _SLOW_START:
                self._kept[form] = worker
        return worker, form.engine != _SLOW_START

    def _close(self, needed: set[Form]) -> None:
        for form in [form for form in self._kept if form not in needed]:
            self._kept.pop(form).close()

    def _has_a_chance(self, row: Row, form: Form, found: Sequence[Form], number: int) -> bool:
        """Whether a peer could be the best of its class, by the rounds so far or by an earlier record."""
        mine = self._so_far(row, form, number)
        if form.ours or mine is None:
            return True
        if row.steady and number:
            return False
        rivals = [other for other in found if other.bits == form.bits and not other.ours]
        values = [value for other in rivals if (value := self._so_far(row, other, number)) is not None]
        good = min(values) >= self.hopeless * mine if row.lower else mine >= self.hopeless * max(values)
        if not good:
            self.dropped.add(f"{form.title}: {row.key}")
        return good

    def _so_far(self, row: Row, form: Form, number: int) -> float | None:
        """The figure of the rounds before this one; of the earlier record in the first."""
        values = self.values.get((row.key, form)) if number else None
        return statistics.median(values) if values else self.known.get((row.key, form.title))


# --- what the machine can do ------------------------------------------------------------------------------------------


def peaks(isa: str = "") -> dict[str, Any]:
    """``octavo bench machine``, in a process of its own."""
    words = [sys.executable, "-m", "octavo.cli.main", "bench", "machine", "--json"]
    environment = {**os.environ, **({"OCTAVO_ISA": isa} if isa else {})}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def limits(session: Session, shapes: dict[bool, Shape], machines: dict[str, Machine]) -> dict[tuple[str, str], float]:
    """What the machine allows of each row and form of octavo."""
    found: dict[tuple[str, str], float] = {}
    for group, row in ((one, row) for one, _ in session.groups for row in one.rows):
        for form, about in session.about.items():
            if form.ours and (row.key, form) in session.values:
                value = limit(
                    row.key,
                    shapes[group.large],
                    machines[form.isa],
                    bits=form.bits,
                    weights_bytes=about["weights_bytes"],
                    kv_token_bytes=about["kv_token_bytes"],
                    requests=group.requests,
                )
                if value is not None:
                    found[row.key, form.title] = value
    return found


# --- the record -------------------------------------------------------------------------------------------------------


def known(files: Sequence[Path]) -> dict[tuple[str, str], float]:
    """The medians of earlier records."""
    return {
        (each["row"], each["form"]): statistics.median(each["rounds"])
        for file in files
        for each in json.loads(file.read_text(encoding="utf-8"))["values"]
    }


def quality(form: Form, sha256: dict[Path, str]) -> dict[str, Any]:
    """The recorded divergence of a form, or why there is none."""
    if "random" in form.model.name:
        return {"mean_kl": None, "reason": "random weights: there is nothing to be faithful to"}
    if form.ours:
        return recorded_quality(sha256[form.model], form.settings["quantization"] or "as stored")
    return peer_quality(form.engine.removesuffix(" (AVX2)"), form.name)


def figures(session: Session, qualities: dict[Form, dict[str, Any]]) -> dict[str, list[Measured]]:
    """The measured forms by row."""
    found: dict[str, list[Measured]] = {}
    for (row, form), values in session.values.items():
        found.setdefault(row, []).append(Measured(form, values, qualities[form]["mean_kl"]))
    return found


def chosen(
    groups: Sequence[Group], small: list[Form], large: list[Form], only: str
) -> Iterator[tuple[Group, list[Form]]]:
    """The work and who does it. ``only``: texts, separated by commas, that a group's key or a form's title holds."""
    wanted = [text for text in only.split(",") if text]
    keys = {group.key for group in groups}
    group_words, form_words = [w for w in wanted if w in keys], [w for w in wanted if w not in keys]
    for group in groups:
        if group_words and group.key not in group_words:
            continue
        found = [form for form in (large if group.large else small) if group.runs(form)]
        found = [form for form in found if not form_words or any(word in form.title for word in form_words)]
        if found:
            yield group, sorted(found, key=lambda form: form.bits)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True, help="folder of models")
    parser.add_argument("--name", default="smollm2-135m", help="the model's name in that folder")
    parser.add_argument("--large", default="llama-1b-random", help="name of the model of the 1B shape")
    parser.add_argument("--stored", type=Path, help="GGUF file that octavo's w4 and llama.cpp's Q4_1 run")
    parser.add_argument("--llama-bin", type=Path, help="folder of llama-bench, llama-batched-bench, llama-completion")
    parser.add_argument("--llama-avx2-bin", type=Path, help="the same, built for AVX2 only")
    parser.add_argument("--openvino-python", type=Path, help="Python of an environment with openvino-genai")
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vLLM")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of quick work")
    parser.add_argument("--long-rounds", type=int, default=3, help="rounds of long work")
    parser.add_argument("--hopeless", type=float, default=0.85, help="share of the best below which a peer is dropped")
    parser.add_argument(
        "--known", type=Path, nargs="*", default=[], help="earlier records that tell which peers to drop"
    )
    parser.add_argument("--threads", type=int, default=probe().default_threads, help="threads of all engines")
    parser.add_argument(
        "--only", default="", help=f"only these groups ({', '.join(g.key for g in GROUPS)}) or forms, by commas"
    )
    parser.add_argument("--estimate", action="store_true", help="say how long it takes, and stop")
    parser.add_argument("--json", type=Path, help="file to write, tables beside it; else one in benchmarks/results")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are ended, too
    engines = Engines(
        Path(sys.executable),
        arguments.llama_bin,
        arguments.llama_avx2_bin,
        arguments.openvino_python,
        arguments.vllm_python,
        arguments.threads,
    )
    small = list(forms(arguments.models, arguments.name, engines, arguments.stored))
    large = list(forms(arguments.models, arguments.large, engines))
    groups = list(chosen(GROUPS, small, large, arguments.only))
    if not groups:
        raise SystemExit("nothing to run: the folder of models lacks the files, or --only fits nothing")
    record = {"what": "octavo and other engines, interleaved", **provenance(["numpy"])}
    words = Words(load_tokenizer(open_checkpoint(arguments.models / arguments.name)))
    session = Session(
        engines,
        words,
        groups,
        arguments.rounds,
        arguments.long_rounds,
        arguments.hopeless,
        known=known(arguments.known),
    )
    if arguments.estimate:
        print(f"about {session.estimate() / 60:.0f} minutes at most")
        return
    levels = sorted({form.isa for _, found in groups for form in found if form.ours})
    before = {isa: peaks(isa) for isa in levels}
    session.run()
    after = {isa: peaks(isa) for isa in levels}
    machines = {isa: Machine.from_records(before[isa], after[isa]) for isa in levels}
    shapes = {large: Shape.read(arguments.models / name) for large, name in ((False, arguments.name),
              (True, arguments.large)) if any(group.large == large for group, _ in groups)}  # fmt: skip

    everyone = sorted({form for _, found in groups for form in found}, key=lambda form: form.title)
    sha256 = {model: model_sha256(model) for model in sorted({form.model for form in everyone})}
    qualities = {form: quality(form, sha256) for form in everyone}
    comparisons = compare(figures(session, qualities), limits(session, shapes, machines))
    record |= {
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "long_rounds": arguments.long_rounds,
        "peers": engines.versions(),
        "machine_peaks": {isa or "native": [before[isa], after[isa]] for isa in levels},
        "models_sha256": {model.name: digest for model, digest in sha256.items()},
        "forms": {
            f"{form.title} of {form.model.name}": {
                "class_bits": form.bits,
                "quality": qualities[form],
                **session.about.get(form, {}),
            }
            for form in everyone
        },
        "commands": sorted(session.commands),
        "not_repeated": sorted(session.dropped),
        "failures": session.failures,
        "values": [
            {"row": row, "form": form.title, "model": form.model.name, "rounds": values}
            for (row, form), values in session.values.items()
        ],
        "comparisons": [each.record() for each in comparisons],
    }
    path = arguments.json or RESULTS / dashed(f"peers {arguments.name} {record['date'][:10]}.json")
    write(record, path)
    table = markdown(comparisons)
    path.with_suffix(".md").write_text(table, encoding="utf-8")
    remarks = [f"{form.title}: {qualities[form]}" for form in everyone] + session.failures
    path.with_suffix(".html").write_text(html(comparisons, str(record["what"]), remarks), encoding="utf-8")
    print(f"\n{table}\nwritten to {path}")


if __name__ == "__main__":
    main()
