"""The real model as the end-to-end tests use it: its Hugging Face form made from the GGUF file, and a mixed load."""

from __future__ import annotations

import json
import random
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo import LLM, RequestOutput, SamplingParams
from octavo.frontend.tokenizer import load_tokenizer
from octavo.weights.checkpoint import open_checkpoint

FORMS = ("bf16", "w8", "w8-wide", "w4")
Bits = tuple[Any, ...]


def write_hugging_face_form(gguf: Path, directory: Path) -> Path:
    """The dequantised file as a bf16 directory with tokenizer and chat template."""
    directory.mkdir(parents=True)
    with closing(open_checkpoint(gguf)) as checkpoint:
        tensors = {}
        for name in checkpoint.names():
            values = checkpoint.tensor(name).read_f32()
            tensors[name] = torch.from_numpy(values.copy()).to(torch.bfloat16)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(dict(checkpoint.config)))
        tokenizer = load_tokenizer(checkpoint)
        tokenizer.backend.save(str(directory / "tokenizer.json"))
        eos = tokenizer.id_to_token(tokenizer.eos_ids[0])
        settings = {"chat_template": tokenizer.chat_template, "eos_token": eos}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(tokenizer.eos_ids)}))
    return directory


@dataclass
class Form:
    """A weight form of the model: which file, and which quantization makes it."""

    name: str
    gguf: Path
    directory: Path
    options: dict[str, Any] = field(default_factory=dict)

    def load(self, **options: Any) -> LLM:
        """w4 is the file's own, exact; the others come from the bf16 directory, some rounded while loading."""
        settings: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 32, "threads": 2, "debug": True}
        if self.name == "w4":
            settings |= {"model": str(self.gguf)}
        else:
            settings |= {"model": str(self.directory), "quantization": "none" if self.name == "bf16" else self.name}
        return LLM(**(settings | options))


@dataclass(frozen=True)
class Ask:
    """One request of the mixed load."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams


def mixed_load(count: int = 32) -> list[Ask]:
    """Greedy and seeded requests of all lengths, some with shared beginnings, penalties, several answers or scores."""
    chance = random.Random(7)
    shared = [chance.randrange(1000, 20000) for _ in range(80)]
    load = []
    for index in range(count):
        length = chance.choice((3, 15, 16, 17, 40, 70, 130, 200))
        own = [chance.randrange(1000, 20000) for _ in range(length)]
        prompt = (shared[: chance.choice((16, 48, 80))] + own[:24]) if index % 4 == 0 else own
        settings: dict[str, Any] = {"max_tokens": chance.choice((4, 9, 16, 20)), "logprobs": 2, "ignore_eos": True}
        if index % 2:
            settings |= {"temperature": chance.choice((0.6, 1.0)), "seed": index, "top_p": chance.choice((0.9, 1.0))}
        else:
            settings |= {"temperature": 0.0}
        if index % 5 == 0:
            settings |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
        if index % 8 == 3:
            settings |= {"n": 2}
        if index % 8 == 6:
            settings |= {"prompt_logprobs": 1}
        load.append(Ask(tuple(prompt), SamplingParams(**settings)))
    return load


def ask(llm: LLM, load: list[Ask]) -> list[Bits]:
    """The answers of all requests at once, reduced to what must be equal: ids and log-probabilities, to the bit."""
    prompts = [{"prompt_token_ids": list(each.prompt_ids)} for each in load]
    outputs = llm.generate(prompts, [each.params for each in load], use_tqdm=False)
    return [_bits(output) for output in outputs]


def _bits(output: RequestOutput) -> Bits:
    def scores(entries: Any) -> Any:
        if entries is None:
            return None
        return [None if e is None else sorted((k, v.logprob.hex(), v.rank) for k, v in e.items()) for e in entries]

    answers = [(tuple(each.token_ids), scores(each.logprobs)) for each in output.outputs]
    return (answers, scores(output.prompt_logprobs))
