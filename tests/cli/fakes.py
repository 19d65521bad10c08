"""A model that answers from a script, standing in for an engine in tests of the command line."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from octavo.frontend.options import EngineOptions
from octavo.frontend.outputs import CompletionOutput, RequestOutput


class FakeTokenizer:
    """One token a character; the chat template marks who speaks."""

    def __init__(self, chat_template: str | None = "template") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


class FakeLLM:
    """Answers prompt after prompt with the texts of ``answers``, one token a character."""

    def __init__(
        self,
        answers: list[str],
        *,
        max_model_len: int = 2000,
        chat_template: str | None = "template",
        during: Callable[[int], None] = lambda token: None,
    ) -> None:
        self._answers = iter(answers)
        self._tokenizer = FakeTokenizer(chat_template)
        self._during = during
        self.max_model_len = max_model_len
        self.options = EngineOptions()
        self.prompts: list[str] = []
        self.params: list[Any] = []
        self.settings: dict[str, Any] = {}
        self.aborted = 0
        self.profile_resets = 0
        self.closed = False

    def wait_for_memory(self, timeout: float = 10.0) -> bool:
        return True

    def get_tokenizer(self) -> FakeTokenizer:
        return self._tokenizer

    def stream(self, prompt: dict[str, list[int]], params: Any) -> Generator[RequestOutput, None, None]:
        ids = prompt["prompt_token_ids"]
        self.prompts.append("".join(map(chr, ids)))
        self.params.append(params)
        finished = False
        try:
            for output in self._outputs(ids, params):
                yield output
                finished = output.finished
        finally:
            self.aborted += not finished

    def _outputs(self, ids: list[int], params: Any) -> Iterator[RequestOutput]:
        answer = "x" * params.max_tokens if params.ignore_eos else next(self._answers)
        for count in range(1, len(answer) + 1):
            self._during(count)
            reason = "stop" if count == len(answer) else None
            completion = CompletionOutput(0, answer[:count], [*range(count)], finish_reason=reason)
            yield RequestOutput("0", None, ids, None, [completion], reason is not None)

    def generate(self, prompts: list[dict[str, list[int]]], params: Any, use_tqdm: bool = True) -> list[RequestOutput]:
        return [list(self.stream(prompt, params))[-1] for prompt in prompts]

    def profile_steps(self) -> list[dict[str, Any]]:
        norm = {"op": "norm", "calls": 4, "time_ms": 1.0, "share": 0.25, "GBps": 5.0, "GOPS": 0.0, "arithmetic": None}
        linear = {"op": "linear", "calls": 7, "time_ms": 3.0, "share": 0.75, "GBps": 20.0, "GOPS": 100.0}
        operations = [norm, {**linear, "arithmetic": "int8"}]
        phases = {"scheduling": 0.5, "native": 4.0, "framing": 0.0}
        return [
            {"step": "decode", "steps": 2, "tokens": 6, "sequences": 6, "phases_ms": phases, "operations": operations}
        ]

    def reset_profile(self) -> None:
        self.profile_resets += 1

    def close(self) -> None:
        self.closed = True


def install(monkeypatch: Any, llm: FakeLLM) -> FakeLLM:
    """Make every command use ``llm``, keeping the settings it was asked for."""

    def load(model: str, **settings: Any) -> FakeLLM:
        llm.settings = {"model": model, **settings}
        return llm

    monkeypatch.setattr("octavo.cli.options.load_llm", load)
    return llm
