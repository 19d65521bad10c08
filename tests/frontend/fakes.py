"""A byte tokenizer and a back end that plays tokens from a script, to test the front end without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from octavo.backends.interface import SampledToken, StepBatch, StepOutput
from octavo.engine.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.phases import PhaseProfile
from octavo.frontend.detokenizer import byte_level_alphabet
from octavo.frontend.loading import LoadedModel
from octavo.frontend.options import EngineOptions
from octavo.frontend.tokenizer import Tokenizer

EOS = 256
BOS = 257
VOCAB = 260  # two more rows in the model than tokens in the vocabulary

CHAT_TEMPLATE = (
    "{% if tools %}[{{ tools | length }} tools]{% endif %}"
    "{% for message in messages %}({{ message.role }}){{ message.content }}{% endfor %}"
    "{% if mood %}[{{ mood }}]{% endif %}"
    "{% if add_generation_prompt %}(assistant){% endif %}"
)

# Given all tokens of a sequence and its prompt's length, the next token.
Script = Callable[[Sequence[int], int], int]


def byte_tokenizer() -> Tokenizer:
    """Each byte of UTF-8 is a token; 256 ends, 257 begins."""
    vocabulary = byte_level_alphabet()
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<bos>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    return Tokenizer(
        backend,
        bos_id=BOS,
        eos_ids=(EOS,),
        pad_id=None,
        unk_id=None,
        special_ids=frozenset({EOS, BOS}),
        chat_templates={"default": CHAT_TEMPLATE},
    )


class ScriptBackend:
    """Samples what the script says, with log-probability -0.5 at rank 1 before an always present second choice."""

    block_size = 16
    vocab_size = VOCAB

    def __init__(self, script: Script, *, num_blocks: int = 256, max_model_len: int = 256) -> None:
        self.script = script
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.steps = 0
        self.seeds: dict[int, int] = {}  # by first prompt token
        self.before_step: Callable[[int], None] = lambda step: None
        self.fail_sequences: set[int] = set()  # first prompt tokens of those whose logits are not finite
        self.closed = False
        self.thread: threading.Thread | None = None

    def execute(self, batch: StepBatch) -> StepOutput:
        self.steps += 1
        self.thread = threading.current_thread()
        self.before_step(self.steps)
        output = StepOutput([])
        for work in batch.work:
            known = work.token_ids[: work.start + work.count].tolist()
            row = work.row
            if work.sample:
                assert row is not None
                self.seeds[known[0]] = row.seed
                output.sampled.append(self._sample(known, len(known) - row.num_output))
            else:
                output.sampled.append(None)
            scored = None
            if work.prompt_logprobs:
                last = work.start + work.count - work.sample
                scored = [_token(int(work.token_ids[at + 1])) for at in range(work.start, last)]
            output.prompt_logprobs.append(scored)
        return output

    def _sample(self, known: list[int], prompt: int) -> SampledToken:
        if known[0] in self.fail_sequences:
            return SampledToken(0, 0.0, 0, [], "logits are not finite")
        return _token(self.script(known, prompt))

    def prompt_logits(self, ids: Sequence[int]) -> Any:
        return [[float(token)] * VOCAB for token in ids]

    def profile(self, step: str | None = None) -> list[dict[str, Any]]:
        return [{"op": "script", "calls": self.steps, "time_ms": 1.0}]

    def set_profiling(self, on: bool) -> None:
        self.profiling = on

    def close(self) -> None:
        self.closed = True


def _token(token: int) -> SampledToken:
    second = (token + 1) % VOCAB
    return SampledToken(token, -0.5, 1, [(token, -0.5), (second, -1.5)])


def says(text: str, then: int = EOS) -> Script:
    """Every answer is this text, then the token ``then`` again and again."""
    data = text.encode()

    def script(known: Sequence[int], prompt: int) -> int:
        place = len(known) - prompt
        return data[place] if place < len(data) else then

    return script


def echo(known: Sequence[int], prompt: int) -> int:
    """Every answer is the prompt's own tokens, again and again."""
    return known[len(known) - prompt]


def load_fake(script: Script | ScriptBackend, **options: Any) -> LoadedModel:
    """A loaded model on the real engine with the fake tokenizer and back end."""
    backend = script if isinstance(script, ScriptBackend) else ScriptBackend(script)
    chosen = EngineOptions.from_kwargs(**options)
    config = EngineConfig(
        num_blocks=backend.num_blocks,
        max_model_len=backend.max_model_len,
        max_num_batched_tokens=chosen.max_num_batched_tokens,
        max_num_seqs=chosen.max_num_seqs,
        policy=chosen.scheduling_policy,
        capacity=chosen.capacity,
        debug=True,
    )
    loaded = LoadedModel(
        options=chosen,
        engine=Engine(config, backend, phases=PhaseProfile() if chosen.profile else None),
        loaded_tokenizer=byte_tokenizer(),
        vocab_size=VOCAB,
        max_model_len=backend.max_model_len,
        backend=backend,
    )
    loaded.resources.callback(backend.close)
    return loaded
