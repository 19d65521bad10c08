"""Answers many prompts at once: python examples/batch.py"""

from octavo import LLM, SamplingParams

PROMPTS = [
    "The three primary colours are",
    "To boil an egg, first",
    "The largest planet of the solar system is",
]


def main() -> None:
    """Generate a continuation of each prompt and print it."""
    with LLM("smollm2-135m") as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24)):
            print(f"{output.prompt}{output.outputs[0].text}\n")


if __name__ == "__main__":
    main()
