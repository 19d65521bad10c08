"""``octavo chat``: a conversation in the terminal, or with lines piped in."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli import options as opt
from octavo.cli.answers import Message, prompt_ids, stream_answer
from octavo.cli.console import remark
from octavo.errors import EngineDeadError, OctavoError

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM
    from octavo.sampling.params import SamplingParams

__all__ = ["Conversation", "LineEditor", "converse", "register"]

HELP = """/clear          forget the conversation
/system TEXT    set the system prompt and start again; without TEXT: show it
/history        show the conversation
/help           show this
/exit           leave (Ctrl-D too); Ctrl-C stops the answer"""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("chat")(chat)


def chat(
    model: opt.Model = opt.DEFAULT_MODEL,
    system: Annotated[
        str | None, typer.Option("--system", "-s", help="System prompt; default: the chat template's own.")
    ] = None,
    max_tokens: opt.MaxTokens = None,
    temperature: opt.Temperature = 0.7,
    top_p: opt.TopP = 0.95,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.05,
    presence_penalty: opt.PresencePenalty = 0.0,
    frequency_penalty: opt.FrequencyPenalty = 0.0,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    quantization: opt.QuantizationOption = None,
    kv_cache_dtype: opt.KvCacheDtypeOption = opt.KvCacheDtype.auto,
    max_model_len: opt.MaxModelLen = None,
    memory_utilization: opt.MemoryUtilization = 0.9,
    threads: opt.Threads = None,
    stats: Annotated[
        bool, typer.Option("--stats/--no-stats", help="Print a line of figures to stderr after each answer.")
    ] = False,
) -> None:
    """Talk with a model. Ctrl-C stops the answer, Ctrl-D leaves, /help lists the commands."""
    from octavo.sampling.params import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop,
        max_tokens=max_tokens,
    )
    llm = opt.load_llm(
        model,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        memory_utilization=memory_utilization,
        threads=threads,
        max_num_seqs=1,
    )
    try:
        converse(Conversation(llm, params, system), show_stats=stats)
    finally:
        llm.close()


class Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self.system = system
        self.turns: list[Message] = []

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.turns.clear()

    def messages(self) -> list[Message]:
        """What the model is shown."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns

    def ask(self, text: str) -> str:
        """Print the answer to ``text`` as it comes and return the line of figures; both become part of the talk."""
        self.turns.append({"role": "user", "content": text})
        try:
            ids, dropped = self._fitting_prompt()
            if dropped:
                remark(f"[the context is full: the oldest {dropped} messages are left out]")
            with _interruptible() as interrupted:
                answer = stream_answer(self._llm, ids, self._params, _write, lambda: interrupted.requested)
        except BaseException:
            # A question that could not be asked must not be asked again with the next one.
            self.turns.pop()
            raise
        if answer.finish_reason is None:
            _write(" [stopped]")
        _write("\n")
        self.turns.append({"role": "assistant", "content": answer.text.strip()})
        return answer.stats()

    def _fitting_prompt(self) -> tuple[list[int], int]:
        """The prompt, without the oldest exchanges where they would leave too little room for the answer."""
        limit = self._llm.max_model_len
        room = min(self._params.max_tokens or limit // 4, limit // 4)
        dropped = 0
        while True:
            ids = prompt_ids(self._llm, self.messages())
            if len(ids) + room <= limit or len(self.turns) < 3:
                return ids, dropped
            del self.turns[:2]
            dropped += 2


def converse(conversation: Conversation, *, show_stats: bool = False) -> None:
    """Read lines until the input ends or /exit; answer each or do what the command says."""
    editor = LineEditor()
    if editor.interactive:
        remark("Ask anything. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
    try:
        for line in editor.lines():
            text = line.strip()
            if text in ("/exit", "/quit"):
                break
            try:
                if text.startswith("/"):
                    _command(conversation, text)
                elif text:
                    stats = conversation.ask(text)
                    if show_stats:
                        remark(f"[{stats}]")
            except EngineDeadError:
                raise
            except OctavoError as error:
                if not editor.interactive:
                    raise
                remark(f"octavo: {error}")
    finally:
        editor.close()


def _command(conversation: Conversation, text: str) -> None:
    name, _, rest = text.partition(" ")
    rest = rest.strip()
    if name == "/clear":
        conversation.clear()
        remark("[the conversation is forgotten]")
    elif name == "/system":
        if rest:
            conversation.system = rest
            conversation.clear()
            remark("[a new conversation with this system prompt]")
        else:
            remark(conversation.system or "[no system prompt: the chat template's own]")
    elif name == "/history":
        for message in conversation.messages():
            remark(f"{message['role']}: {message['content']}")
    elif name == "/help":
        remark(HELP)
    else:
        remark(f"[unknown command {name}: /help lists them]")


class LineEditor:
    """Reads lines: with editing and a history kept between sessions on a terminal, plainly from a pipe."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._history: Path | None = None
        if self.interactive:
            self._history = _load_history()

    def lines(self) -> Iterator[str]:
        """Each line until the end of the input. Ctrl-C at the prompt drops the line."""
        if not self.interactive:
            yield from sys.stdin
            return
        while True:
            try:
                yield input("\n> ")
            except EOFError:
                remark("")
                return
            except KeyboardInterrupt:
                remark("\n[Ctrl-D or /exit leaves]")

    def close(self) -> None:
        """Keep the lines typed for the next session."""
        if self._history is not None:
            _save_history(self._history)


def _history_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "octavo" / "chat_history"


def _load_history() -> Path | None:
    try:
        import readline
    except ImportError:
        # A Python built without readline reads plain lines.
        return None
    path = _history_path()
    # There may be none yet, or it cannot be read: the conversation matters more.
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    return path


def _save_history(path: Path) -> None:
    import readline

    readline.set_history_length(1000)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        readline.write_history_file(path)
    except OSError as error:
        remark(f"[the input history could not be kept: {error}]")


class _Interrupt:
    """Whether Ctrl-C was pressed while an answer was being generated."""

    def __init__(self) -> None:
        self.requested = False

    def request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


@contextlib.contextmanager
def _interruptible() -> Iterator[_Interrupt]:
    """Note Ctrl-C instead of raising: an exception in the middle of a step would leave the engine torn."""
    interrupt = _Interrupt()
    previous = signal.signal(signal.SIGINT, interrupt.request)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
