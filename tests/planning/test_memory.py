"""The memory plan fills the budget sensibly, and says in numbers why a model does not fit and what would help."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import CapacityError, ConfigError
from octavo.planning.hardware import Hardware, MemoryCeiling
from octavo.planning.memory import Alternative, MemoryNeeds, plan_memory

MB = 10**6
GB = 10**9


def machine(*ceilings: tuple[int, int]) -> Hardware:
    memory = tuple(MemoryCeiling("physical" if not i else "cgroup v2", *pair) for i, pair in enumerate(ceilings))
    return Hardware("CPU", "x86_64", 2, 2, None, memory, "madvise")


def needs(**changes: object) -> MemoryNeeds:
    base = MemoryNeeds(
        weights_bytes=100 * MB, block_bytes=400_000, arena_bytes=50 * MB, model_max_len=8192, reserve_bytes=100 * MB
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_pool_never_exceeds_what_the_sequences_can_fill() -> None:
    plan = plan_memory(needs(max_num_seqs=4, max_model_len=1600), machine((64 * GB, 0)))
    assert plan.num_blocks == 4 * 100
    assert plan.full_sequences == 4


def test_the_pool_takes_the_rest_of_a_small_machine() -> None:
    plan = plan_memory(needs(), machine((4 * GB, GB)))
    assert plan.budget_bytes == int(3.6 * GB) - GB
    assert plan.num_blocks == (plan.budget_bytes - 250 * MB) // 400_000
    assert plan.total_bytes <= plan.budget_bytes


def test_the_limit_that_leaves_the_least_room_counts() -> None:
    plan = plan_memory(needs(), machine((64 * GB, 0), (2 * GB, 500 * MB)))
    assert plan.limit_bytes == 2 * GB
    assert plan.budget_bytes == int(1.8 * GB) - 500 * MB


def test_an_open_length_is_shortened_to_what_fits_and_said() -> None:
    plan = plan_memory(needs(), machine((500 * MB, 0)))
    assert plan.max_model_len == plan.num_blocks * 16 < 8192
    assert "max_model_len" in plan.notes[0]
    assert plan.notes[0] in plan.render()


def test_a_demanded_length_is_kept_or_refused() -> None:
    with pytest.raises(CapacityError, match=r"missing") as caught:
        plan_memory(needs(max_model_len=8192), machine((400 * MB, 0)))
    error = caught.value
    assert error.unit == "bytes"
    assert error.needed is not None
    assert error.available is not None
    assert f"{error.needed - error.available:,} bytes" in str(error)
    assert "\n" not in str(error)


def test_every_remedy_named_by_a_refusal_makes_the_model_fit() -> None:
    wanted = needs(
        max_model_len=8192,
        alternatives=(
            Alternative("quantization='w4'", 25 * MB, 100_000, 50 * MB),
            Alternative("kv_cache_dtype='f32'", 100 * MB, 800_000, 50 * MB),
        ),
    )
    small = machine((480 * MB, 0))
    with pytest.raises(CapacityError) as caught:
        plan_memory(wanted, small)
    text = str(caught.value)
    found = re.search(r"max_model_len=(\d+)", text)
    assert found is not None
    plan_memory(replace(wanted, max_model_len=int(found[1])), small)
    with pytest.raises(CapacityError):
        plan_memory(replace(wanted, max_model_len=int(found[1]) + 16), small)
    found = re.search(r"memory_utilization=([\d.]+)", text)
    assert found is not None
    plan_memory(replace(wanted, memory_utilization=float(found[1])), small)
    assert "quantization='w4'" in text
    assert "kv_cache_dtype" not in text


def test_a_hopeless_case_promises_nothing() -> None:
    with pytest.raises(CapacityError, match="no single setting makes it fit"):
        plan_memory(needs(weights_bytes=100 * GB), machine((GB, 0)))


def test_a_fixed_pool_is_taken_as_given() -> None:
    assert plan_memory(needs(num_blocks=7), machine((64 * GB, 0))).num_blocks == 7
    assert plan_memory(needs(kv_cache_bytes=3_000_000), machine((64 * GB, 0))).num_blocks == 7
    assert plan_memory(needs(num_blocks=7), machine((64 * GB, 0))).max_model_len == 7 * 16


def test_a_fixed_pool_beyond_the_budget_is_refused_with_the_largest_that_fits() -> None:
    small = machine((GB, 0))
    with pytest.raises(CapacityError) as caught:
        plan_memory(needs(num_blocks=10_000), small)
    found = re.search(r"num_gpu_blocks_override=(\d+)", str(caught.value))
    assert found is not None
    plan_memory(needs(num_blocks=int(found[1])), small)


def test_a_pool_smaller_than_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        plan_memory(needs(kv_cache_bytes=5), machine((GB, 0)))


def test_the_table_names_every_part() -> None:
    text = plan_memory(needs(weights_form="w4", kv_dtype="bf16"), machine((8 * GB, GB))).render()
    for part in ("weights", "KV pool", "arena", "reserve", "blocks", "tokens", "sequences", "w4", "bf16"):
        assert part in text


@given(
    limit=st.integers(1, 10**12),
    in_use=st.integers(0, 10**12),
    weights=st.integers(0, 10**11),
    block=st.integers(1, 10**8),
    length=st.none() | st.integers(1, 10**6),
    sequences=st.integers(1, 512),
)
def test_a_plan_always_fits_or_is_refused(
    limit: int, in_use: int, weights: int, block: int, length: int | None, sequences: int
) -> None:
    wanted = needs(weights_bytes=weights, block_bytes=block, max_model_len=length, max_num_seqs=sequences)
    refusal = None
    try:
        plan = plan_memory(wanted, machine((limit, in_use)))
    except CapacityError as error:
        refusal = error
    if refusal is not None:
        assert (refusal.needed or 0) > (refusal.available or 0)
        return
    assert plan.total_bytes <= plan.budget_bytes
    assert plan.full_sequences >= 1
    assert plan.num_blocks <= sequences * -(-(length or 8192) // 16)
