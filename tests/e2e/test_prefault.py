"""Prefaulting gives the KV pool its memory early and changes nothing else."""

from __future__ import annotations

import os

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ParameterError

PAGE = os.sysconf("SC_PAGE_SIZE")
LINUX = tuple(int(part) for part in os.uname().release.split(".")[:2])


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def answer(llm: LLM) -> list[int]:
    prompt = {"prompt_token_ids": list(range(100, 140))}
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.skipif(LINUX < (5, 14), reason="MADV_POPULATE_WRITE came with Linux 5.14")
def test_the_blocks_used_first_get_memory_and_answers_stay_the_same() -> None:
    plain = LLM(kv_cache_bytes=128 << 20, max_model_len=512, kv_prefault_bytes=0)
    assert plain.wait_for_memory(0.0)
    untouched = resident()
    expected = answer(plain)
    plain.close()
    llm = LLM(kv_cache_bytes=128 << 20, max_model_len=512, kv_prefault_bytes=96 << 20)
    try:
        assert llm.wait_for_memory(120.0)
        assert resident() - untouched > 64 << 20
        assert answer(llm) == expected
    finally:
        llm.close()


def test_an_engine_can_be_closed_while_memory_is_still_being_found() -> None:
    for _ in range(2):
        LLM(kv_cache_bytes=512 << 20, max_model_len=512, kv_prefault_bytes=1 << 40).close()


@pytest.mark.parametrize("value", [-1, 1.5, True, "1"])
def test_a_wrong_amount_is_refused(value: object) -> None:
    with pytest.raises(ParameterError, match="kv_prefault_bytes"):
        LLM(kv_prefault_bytes=value)
