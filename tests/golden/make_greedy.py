"""Makes smollm2_greedy.json: what transformers answers greedily, in float32, to twenty prompts.

    python tests/golden/make_greedy.py MODEL_DIRECTORY

MODEL_DIRECTORY is SmolLM2-135M-Instruct as a Hugging Face directory with bf16 weights. End tokens do not end an answer,
so every answer has the same length. For each step there is the token chosen, its log-probability, the runner-up and how
far the runner-up's logit lies below: where that margin is small, another correct engine may choose the other token.
Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

STEPS = 64
OUTPUT = Path(__file__).with_name("smollm2_greedy.json")

# Text that is continued as it stands.
RAW = (
    "The lighthouse keeper climbed the stairs every evening, and",
    "Photosynthesis is the process by which",
    "def fibonacci(n: int) -> int:\n    ",
    "SELECT name, COUNT(*) FROM orders\nWHERE",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "12 + 7 = 19\n25 + 14 = 39\n31 + 46 =",
    "Shopping list:\n- apples\n- bread\n-",
    "Es war einmal ein alter König, der",
    "La recette de la soupe aux légumes commence par",
    "日本の首都は東京です。",
    '{"name": "Ada Lovelace", "born": 1815, "field": "',
    "A",
    "  \n\tIndented   text,  with odd spacing…  and naïve café 🙂\n",
    "Chapter 1\n\n" + "It was a quiet morning in the village, and nobody had yet noticed the ship. " * 24,
)

# Conversations, put into text by the model's chat template.
CHATS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "Give me three tips for learning to play the piano."},),
    ({"role": "user", "content": "What is 17 times 6? Show your steps."},),
    ({"role": "user", "content": "Write a Python function that reverses the words of a sentence."},),
    (
        {"role": "system", "content": "You are a pirate. Answer in one short sentence."},
        {"role": "user", "content": "How do I cook rice?"},
    ),
    (
        {"role": "user", "content": "My favourite colour is green."},
        {"role": "assistant", "content": "Green is a lovely colour!"},
        {"role": "user", "content": "¿Cuál es mi color favorito?"},
    ),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The chosen token of every step, and by how much it was chosen."""

    ids: list[int]
    logprobs: list[float]
    runners_up: list[int]
    margins: list[float]


def answer(model: Any, prompt_ids: list[int]) -> Answer:
    """Choose the likeliest token STEPS times after ``prompt_ids``."""
    made = model.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=STEPS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    result = Answer(made.sequences[0, len(prompt_ids) :].tolist(), [], [], [])
    for chosen, (logits,) in zip(result.ids, made.logits, strict=True):
        (best, second), (first_id, second_id) = (pair.tolist() for pair in logits.topk(2))
        if first_id != chosen:
            raise SystemExit(f"transformers chose {chosen}, but the likeliest token is {first_id}")
        result.logprobs.append(round(best - float(logits.logsumexp(-1)), 4))
        result.runners_up.append(second_id)
        result.margins.append(round(best - second, 4))
    return result


def case(model: Any, tokenizer: Any, prompt: str, messages: tuple[dict[str, str], ...] | None) -> dict[str, Any]:
    """One entry of the file; ``messages`` is the conversation that ``prompt`` was made from, if it was."""
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    made = answer(model, ids)
    entry: dict[str, Any] = {"prompt": prompt} if messages is None else {"prompt": prompt, "messages": messages}
    return entry | {
        "prompt_ids": ids,
        "ids": made.ids,
        "text": tokenizer.decode(made.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        "logprobs": made.logprobs,
        "runners_up": made.runners_up,
        "margins": made.margins,
    }


def make(directory: Path) -> dict[str, Any]:
    """The whole content of the file."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    cases = [case(model, tokenizer, prompt, None) for prompt in RAW]
    for messages in CHATS:
        prompt = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        cases.append(case(model, tokenizer, prompt, messages))
    return {
        "about": (
            "Greedy answers of SmolLM2-135M-Instruct (bf16 weights, float32 arithmetic), end tokens ignored; "
            "made by make_greedy.py"
        ),
        "weights_sha256": hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "steps": STEPS,
        "cases": cases,
    }


def write(content: dict[str, Any], path: Path) -> None:
    """Write JSON with one line for each case, so that a change of one answer is a change of one line."""
    head = {key: value for key, value in content.items() if key != "cases"}
    lines = [json.dumps(item, ensure_ascii=False, separators=(",", ":")) for item in content["cases"]]
    text = json.dumps(head, ensure_ascii=False, indent=1)[:-2]
    path.write_text(text + ',\n "cases": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="directory of SmolLM2-135M-Instruct with bf16 weights")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file to write; default: beside this script")
    arguments = parser.parse_args()
    write(make(arguments.model), arguments.output)


if __name__ == "__main__":
    main()
