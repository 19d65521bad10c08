"""The profile of phases adds up what steps took, apart for steps of prompts, of decodes, and of both."""

from __future__ import annotations

from octavo.backends.interface import StepBatch, StepOutput, StepTimes, step_kind
from octavo.engine.phases import PHASES, PhaseProfile
from tests.engine.fakes import greedy, make_engine, prompt_of, request


def test_a_step_is_called_by_what_is_in_it() -> None:
    assert [step_kind(0, 2), step_kind(1, 2), step_kind(2, 2)] == ["prefill", "mixed", "decode"]


def test_steps_of_a_kind_are_added_up_and_what_follows_a_step_belongs_to_it() -> None:
    profile = PhaseProfile()
    assert profile.report() == []
    profile.step(2, 2, 2, {"native": 0.25, "scheduling": 0.5})
    profile.add("detokenising", 1.0)
    profile.step(2, 3, 40, {"native": 1.0})
    profile.step(1, 1, 1, {"native": 0.5})
    profile.add("detokenising", 2.0)
    mixed, decode = profile.report()
    assert (mixed["step"], mixed["steps"], mixed["sequences"], mixed["tokens"]) == ("mixed", 1, 3, 40)
    assert (decode["step"], decode["steps"], decode["sequences"], decode["tokens"]) == ("decode", 2, 3, 3)
    assert tuple(decode["phases_ms"]) == PHASES
    spent = {phase: value for phase, value in decode["phases_ms"].items() if value}
    assert spent == {"scheduling": 500.0, "native": 750.0, "detokenising": 3000.0}
    profile.clear()
    profile.add("framing", 1.0)  # of a step that is forgotten
    assert profile.report() == []


def profiled(backend_times: StepTimes | None) -> tuple[PhaseProfile, list[int]]:
    """The phases of a step of a prompt, of both and of a decode, and how many decodes the back end was told of."""
    engine, backend = make_engine()
    phases = engine.phases = PhaseProfile()
    decodes = []
    compute = backend.execute

    def execute(batch: StepBatch) -> StepOutput:
        decodes.append(batch.decodes)
        output = compute(batch)
        output.times = backend_times
        return output

    engine.backend.execute = execute  # type: ignore[method-assign]
    engine.add(request("a", prompt_of(5), greedy(3)))
    engine.step()
    engine.add(request("b", prompt_of(7), greedy(1)))
    while engine.has_work():
        engine.step()
    return phases, decodes


def test_the_engine_notes_what_the_back_end_says_of_each_step() -> None:
    phases, decodes = profiled(StepTimes(tables=1.0, binding=2.0, native=4.0, results=8.0))
    assert decodes == [0, 1, 1]
    prefill, mixed, decode = phases.report()
    assert [prefill["tokens"], mixed["tokens"], decode["tokens"]] == [5, 8, 1]
    for step in (prefill, mixed, decode):
        spent = step["phases_ms"]
        assert [spent[name] for name in ("block tables", "binding", "native", "sampling")] == [1e3, 2e3, 4e3, 8e3]
        assert spent["scheduling"] > 0
        assert spent["bookkeeping"] > 0


def test_all_of_a_back_end_that_says_nothing_is_native() -> None:
    for step in profiled(None)[0].report():
        assert step["phases_ms"]["native"] > 0
        assert step["phases_ms"]["binding"] == 0
