"""Vectors of texts: as transformers pools them, the same bits in any company, and clear refusals."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM, AsyncEncoder, Encoder
from octavo.errors import CapacityError, EngineDeadError, ModelError, ParameterError
from octavo.frontend.building import build_model
from octavo.frontend.pooling import Pooling, is_encoder, read_pooling
from octavo.weights.hub import resolve_model
from tests.models.test_encoders import make_tiny_encoder, transformers_vectors
from tests.models.tiny import TINY_MODELS, make_tiny_model, random_tokens

TEXTS = [random_tokens(length, seed=length) for length in (1, 3, 16, 17, 63, 64, 65, 80)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return Encoder(str(folder))


def pooled(vectors: np.ndarray, kind: str) -> np.ndarray:
    result = {
        "cls": lambda: vectors[0],
        "last": lambda: vectors[-1],
        "mean": lambda: vectors.mean(0),
        "max": lambda: vectors.max(0),
        "mean_sqrt_len": lambda: vectors.sum(0) / np.sqrt(len(vectors)),
    }[kind]()
    return result / np.linalg.norm(result)


@pytest.mark.parametrize("kind", ["cls", "mean", "max", "last", "mean_sqrt_len"])
def test_vectors_are_those_of_transformers_pooled(folder: Path, kind: Any) -> None:
    with Encoder(str(folder), pooling=kind) as encoder:
        found = encoder.embed(TEXTS)
    for ids, embedding in zip(TEXTS, found, strict=True):
        expected = pooled(transformers_vectors(folder, ids), kind)
        assert embedding.num_tokens == len(ids)
        assert float(embedding.vector @ expected) > 0.9995  # weights, keys and values are rounded to bf16
        assert abs(float(np.linalg.norm(embedding.vector)) - 1) < 1e-6


@pytest.mark.parametrize("quantization", [None, "w8"])
def test_a_vector_does_not_depend_on_the_texts_beside_it(folder: Path, quantization: str | None) -> None:
    with Encoder(str(folder), pooling="mean", quantization=quantization, max_num_batched_tokens=128) as encoder:
        together = encoder.embed(TEXTS)
        alone = [encoder.embed([ids])[0] for ids in TEXTS]
        backwards = encoder.embed(TEXTS[::-1])[::-1]
    with Encoder(str(folder), pooling="mean", quantization=quantization, threads=1, max_num_seqs=2) as other:
        elsewhere = other.embed(TEXTS)
    for vectors in zip(together, alone, backwards, elsewhere, strict=True):
        assert len({embedding.vector.tobytes() for embedding in vectors}) == 1


def test_vectors_can_be_left_as_long_as_they_are(folder: Path, encoder: Encoder) -> None:
    with Encoder(str(folder), normalize=False) as plain:
        (long,) = plain.embed([TEXTS[3]])
    (unit,) = encoder.embed([TEXTS[3]])
    np.testing.assert_allclose(long.vector / np.linalg.norm(long.vector), unit.vector, rtol=1e-6, atol=1e-7)
    assert abs(float(np.linalg.norm(long.vector)) - 1) > 0.01


def test_texts_that_are_too_long_are_refused_or_cut(encoder: Encoder) -> None:
    with pytest.raises(ParameterError, match="81 tokens, and this model takes at most 80"):
        encoder.embed([random_tokens(81)])
    (cut,) = encoder.embed([random_tokens(200)], truncate=True)
    assert cut.num_tokens == 80
    assert np.array_equal(cut.vector, encoder.embed([random_tokens(200)[:80]])[0].vector)
    with pytest.raises(ParameterError, match="at least one token"):
        encoder.embed([[]])
    with pytest.raises(ParameterError, match="token ids from 0 to 299"):
        encoder.embed([[5, 300]])


def test_what_says_nothing_of_encoders_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="kv_cache_bytes"):
        Encoder(str(folder), kv_cache_bytes=1 << 20)
    with pytest.raises(ParameterError, match="pooling"):
        Encoder(str(folder), pooling="median")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="at most the model's 80"):
        Encoder(str(folder), max_model_len=81)
    with pytest.raises(ModelError, match="makes embeddings"):
        LLM(str(folder))
    with pytest.raises(ModelError, match="generates text"):
        Encoder(str(make_tiny_model(TINY_MODELS["llama"], tmp_path)))


def test_a_built_encoder_gives_the_same_vectors(folder: Path, encoder: Encoder, tmp_path: Path) -> None:
    build_model(folder, tmp_path / "built")
    assert is_encoder(tmp_path / "built")
    with Encoder(str(tmp_path / "built")) as built:
        found = built.embed(TEXTS)
    for one, other in zip(found, encoder.embed(TEXTS), strict=True):
        assert np.array_equal(one.vector, other.vector)


def test_many_callers_get_their_own_vectors(folder: Path, encoder: Encoder) -> None:
    service = AsyncEncoder(str(folder), max_num_batched_tokens=96)
    try:

        async def everybody() -> list[Any]:
            return await asyncio.gather(*(service.embed([ids, TEXTS[0]]) for ids in TEXTS * 3))

        for (found, first), expected in zip(asyncio.run(everybody()), encoder.embed(TEXTS * 3), strict=True):
            assert np.array_equal(found.vector, expected.vector)
            assert first.num_tokens == 1

        async def impatient() -> None:
            task = asyncio.ensure_future(service.embed(TEXTS * 20))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await service.embed(TEXTS[:1])

        asyncio.run(impatient())
        assert service.num_running == 0
        assert service.engine_alive
    finally:
        service.shutdown()
    assert not service.engine_alive
    with pytest.raises(EngineDeadError):
        asyncio.run(service.embed(TEXTS[:1]))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_an_encoder_that_has_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = AsyncEncoder(str(folder))

    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(service.encoder, "next_step", broken)
    with pytest.raises(EngineDeadError):
        asyncio.run(service.embed(TEXTS[:1]))
    service.shutdown()
    assert isinstance(service.failure, RuntimeError)
    assert not service.engine_alive


def test_an_encoder_that_does_not_fit_says_by_how_much(folder: Path) -> None:
    with pytest.raises(CapacityError, match="are available") as refused:
        Encoder(str(folder), memory_utilization=1e-6)
    assert refused.value.unit == "bytes"
    assert (refused.value.needed or 0) > (refused.value.available or 0)


# -- what the files say


def write_modules(folder: Path, pooling: dict[str, Any], *more: str, text: str | None = None) -> Path:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), *((name, f"{name}") for name in more)]
    listed = [{"idx": i, "type": f"sentence_transformers.models.{name}", "path": path} for i, (name, path) in
              enumerate(modules)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(listed) if text is None else text)
    return folder


def test_pooling_is_what_the_files_say(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pooling("cls", True, None)
    write_modules(tmp_path, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "Normalize")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert read_pooling(tmp_path) == Pooling("mean", True, 256)
    write_modules(tmp_path, {"pooling_mode_lasttoken": True})
    assert read_pooling(tmp_path) == Pooling("last", False, 256)


@pytest.mark.parametrize(
    ("pooling", "more", "text", "message"),
    [
        ({"pooling_mode_cls_token": True}, ("Dense",), None, "'Dense' is not supported"),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, (), None, "exactly one"),
        ({"pooling_mode_weightedmean_tokens": True}, (), None, "weightedmean"),
        ({}, (), None, "pools none"),
        ({}, (), "[]", "1 to 16 modules"),
        ({}, (), "[1]", "a type and a path"),
        ({}, (), '[{"type": "x.Pooling", "path": "../../etc"}]', "leaves the folder"),
        ({}, (), '[{"type": "x.Transformer", "path": ""}]', "no Pooling module"),
        ({}, (), "[", "not valid JSON"),
    ],
)
def test_pooling_that_cannot_be_honoured_is_refused(
    pooling: dict[str, Any], more: tuple[str, ...], text: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_pooling(write_modules(tmp_path, pooling, *more, text=text))


# -- the real model


def test_the_real_model_finds_what_belongs_together() -> None:
    path = resolve_model("all-minilm-l6-v2")
    texts = [
        "How do I bake bread?",
        "A recipe for a loaf: flour, water, salt and yeast.",
        "The central bank raised interest rates.",
        "Monetary policy was tightened.",
    ]
    with Encoder(str(path)) as encoder:
        assert (encoder.width, encoder.max_model_len, str(encoder.pooling)) == (
            384,
            256,
            "mean of the tokens, normalised",
        )
        found = encoder.embed(texts)
        ids = [encoder.tokens(text) for text in texts]
    for tokens, embedding in zip(ids, found, strict=True):
        expected = pooled(transformers_vectors(path, tokens), "mean")
        assert float(embedding.vector @ expected) > 0.9999
    likeness = np.array([[float(a.vector @ b.vector) for b in found] for a in found])
    assert likeness[0, 1] > 2 * max(likeness[0, 2], likeness[0, 3])
    assert likeness[2, 3] > 2 * max(likeness[0, 2], likeness[1, 3])
