"""Mutated files: the readers answer with a model or a WeightsError, never anything else, and in bounded memory."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from octavo.errors import WeightsError
from octavo.weights import Checkpoint, open_checkpoint
from tests.weights.gguf_files import TensorSpec, Typed, tiny_model

MEMORY_LIMIT = 48 << 20
INTERESTING = [0, 1, 2, 7, 8, 31, 32, 127, 128, 255]
WIDE = [0, 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 40]


def seed_gguf() -> bytes:
    metadata = {
        "everything": Typed(9, [Typed(9, [1, 2, 3], 4), Typed(9, ["a", "b"], 8)], 9),
        "flags": Typed(9, [True, False], 7),
        "llama.rope.scaling.type": "linear",
    }
    spec = tiny_model(hidden=32, heads=2, kv_heads=1, intermediate=32, vocab=8, kind="Q4_1", metadata=metadata)
    factors = np.linspace(1, 8, 8).astype("<f4").tobytes()
    spec.tensors = [*spec.tensors, TensorSpec("rope_freqs.weight", (8,), "F32", factors)]
    return spec.to_bytes()


def seed_safetensors() -> bytes:
    rng = np.random.default_rng(0)
    tensors = {f"layer.{index}.weight": rng.standard_normal((4, 6)).astype(np.float32) for index in range(4)}
    return save({**tensors, "half": np.ones(5, np.float16)}, {"format": "pt"})


SEEDS: dict[str, bytes] = {"gguf": seed_gguf(), "safetensors": seed_safetensors()}
# Where the structure is: mutations beyond it only change weights.
STRUCTURE = {"gguf": SEEDS["gguf"].index(b"rope_freqs.weight") + 64, "safetensors": 8 + 600}


def read_everything(checkpoint: Checkpoint) -> None:
    for name in checkpoint.names():
        checkpoint.tensor(name).read_f32()


def open_mutated(folder: Path, kind: str, content: bytes) -> None:
    """Open and read the content as a checkpoint; whatever happens must be success or a WeightsError of one line."""
    if kind == "gguf":
        path = folder / "m.gguf"
        path.write_bytes(content)
    else:
        path = folder / "m"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(content)
    message = ""
    tracemalloc.start()
    try:
        read_everything(open_checkpoint(path))
    except WeightsError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY_LIMIT
    assert "\n" not in message
    assert len(message) < 1200


def mutate(rng: np.random.Generator, kind: str) -> bytes:
    """One to four changes to the seed file: bytes, whole numbers, pieces cut, doubled or swapped."""
    content = bytearray(SEEDS[kind])
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(0, min(STRUCTURE[kind], len(content) or 1)))
        choice = int(rng.integers(0, 7))
        if choice == 0:
            content[at : at + 1] = bytes([int(rng.choice(INTERESTING))])
        elif choice == 1 and at < len(content):
            content[at] ^= 1 << int(rng.integers(0, 8))
        elif choice == 2:
            content[at : at + 8] = struct.pack("<Q", WIDE[int(rng.integers(0, len(WIDE)))])
        elif choice == 3:
            content[at : at + 4] = struct.pack("<I", WIDE[int(rng.integers(0, 4))])
        elif choice == 4:
            del content[at : at + int(rng.integers(1, 40))]
        elif choice == 5:
            piece = content[at : at + int(rng.integers(1, 40))]
            content[at:at] = piece
        else:
            del content[max(int(rng.integers(0, len(content) + 1)), 1) :]
    return bytes(content)


@pytest.mark.parametrize("kind", SEEDS)
def test_the_unchanged_files_are_read(tmp_path: Path, kind: str) -> None:
    open_mutated(tmp_path, kind, SEEDS[kind])
    assert STRUCTURE[kind] < len(SEEDS[kind])


@pytest.mark.parametrize("kind", SEEDS)
@pytest.mark.parametrize("seed", range(4))
def test_mutated_files_are_read_or_refused(tmp_path: Path, kind: str, seed: int) -> None:
    rng = np.random.default_rng([seed, len(kind)])
    for _ in range(150):
        open_mutated(tmp_path, kind, mutate(rng, kind))


@pytest.mark.parametrize("kind", SEEDS)
def test_files_cut_anywhere_in_their_structure_are_refused(tmp_path: Path, kind: str) -> None:
    for length in range(1, STRUCTURE[kind], 5):
        path = tmp_path / ("cut.gguf" if kind == "gguf" else "cut.safetensors")
        path.write_bytes(SEEDS[kind][:length])
        with pytest.raises(WeightsError):
            opener(kind)(path)


def opener(kind: str) -> Callable[[Path], object]:
    from octavo.weights.gguf_file import GgufFile
    from octavo.weights.safetensors_files import SafetensorsFile

    return GgufFile if kind == "gguf" else SafetensorsFile


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=400), prefixed=st.booleans())
def test_arbitrary_bytes_are_refused_as_gguf(tmp_path: Path, content: bytes, prefixed: bool) -> None:
    head = b"GGUF" + struct.pack("<I", 3) if prefixed else b""
    open_mutated(tmp_path, "gguf", head + content)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F16", "U8", "F4", "I64"]) | json_values,
        "shape": st.lists(st.integers(-1, 5) | st.sampled_from(WIDE), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-1, 64) | st.sampled_from(WIDE), max_size=3) | json_values,
    }
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.text(max_size=12), entries | json_values, max_size=4), size=st.integers(0, 64))
def test_arbitrary_headers_are_read_or_refused_as_safetensors(tmp_path: Path, header: object, size: int) -> None:
    text = json.dumps(header).encode()
    open_mutated(tmp_path, "safetensors", struct.pack("<Q", len(text)) + text + bytes(size))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet='{}[]",:0123456789eE+-.\\utfnalsr', max_size=200))
def test_arbitrary_header_text_is_refused_as_safetensors(tmp_path: Path, text: str) -> None:
    raw = text.encode()
    open_mutated(tmp_path, "safetensors", struct.pack("<Q", len(raw)) + raw)


def test_many_claims_in_a_small_file_take_little_memory(tmp_path: Path) -> None:
    arrays = b"".join(
        struct.pack("<Q", 2) + f"{index:02d}".encode() + struct.pack("<IIQ", 9, 0, 7_000_000) for index in range(50)
    )
    open_mutated(tmp_path, "gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 50) + arrays)
