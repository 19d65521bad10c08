"""``octavo run``: one answer to one question, streamed to stdout."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from octavo.cli import options as opt
from octavo.cli.answers import prompt_ids, stream_answer
from octavo.cli.console import remark
from octavo.cli.profile import print_profile
from octavo.errors import ConfigError

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("run")(run)


def run(
    prompt: Annotated[
        str | None, typer.Argument(help="The question; '-' or nothing with input piped in: read from stdin.")
    ] = None,
    model: opt.Model = opt.DEFAULT_MODEL,
    system: Annotated[
        str | None, typer.Option("--system", "-s", help="System prompt; default: the chat template's own.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the model's chat template.")
    ] = False,
    max_tokens: opt.MaxTokens = None,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
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
        bool | None,
        typer.Option("--stats/--no-stats", help="Print a line of figures to stderr; default: on a terminal."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Print where the time went, by phase and native operation, to stderr.")
    ] = False,
) -> None:
    """Answer one question and stop: octavo run "Why is the sky blue?" """
    from octavo.sampling.params import SamplingParams

    text = _prompt_text(prompt)
    if raw and system is not None:
        raise ConfigError("--raw uses no chat template, so there is no place for --system: give one of the two")
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
        profile=profile,
    )
    try:
        if raw:
            ids = list(llm.get_tokenizer().encode(text))
        else:
            messages = [{"role": "user", "content": text}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            ids = prompt_ids(llm, messages)
        answer = stream_answer(llm, ids, params, _write)
        if not answer.text.endswith("\n"):
            _write("\n")
        if stats or (stats is None and sys.stderr.isatty()):
            remark(f"[{answer.stats()}]")
        if profile:
            print_profile(llm)
    finally:
        llm.close()


def _prompt_text(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        text = prompt
    elif prompt == "-" or not sys.stdin.isatty():
        text = sys.stdin.read()
    else:
        raise ConfigError('nothing to answer: give a question, as in octavo run "Why is the sky blue?"')
    if not text.strip():
        raise ConfigError('the question is empty: give one, as in octavo run "Why is the sky blue?"')
    return text


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
