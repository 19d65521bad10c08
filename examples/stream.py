"""Streams several answers at the same time with AsyncLLM: python examples/stream.py"""

import asyncio

from octavo import AsyncLLM, SamplingParams

QUESTIONS = ["Name three rivers.", "What is a prime number?"]


async def answer(llm: AsyncLLM, number: int, question: str) -> None:
    """Print each piece of the answer as it comes, marked with its number."""
    messages = [{"role": "user", "content": question}]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    async for output in llm.chat(messages, params, request_id=str(number), output_kind="delta"):
        print(f"[{number}] {output.outputs[0].text!r}")


async def main() -> None:
    """Ask all questions at once."""
    llm = AsyncLLM("smollm2-135m")
    try:
        await asyncio.gather(*(answer(llm, number, question) for number, question in enumerate(QUESTIONS)))
    finally:
        llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
