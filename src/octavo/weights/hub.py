"""From the name of a model to its files: a known name, a local path, or a repository of the Hugging Face hub."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import DownloadError, ModelError, WeightsError
from octavo.weights.gguf_split import first_part, part_paths
from octavo.weights.json_files import read_json_object
from octavo.weights.model_cache import Progress, reporting_growth
from octavo.weights.packaged_models import PACKAGED_MODELS, fetch_packaged, find_packaged
from octavo.weights.safetensors_files import INDEX_NAME, SINGLE_NAME

__all__ = ["Progress", "pull", "resolve_model"]

HUB_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(@(?P<revision>[\w./-]{1,200}))?(:(?P<file>[\w./ -]+\.gguf))?"
)
CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def resolve_model(name: str, *, progress: Progress | None = None) -> Path:
    """The directory or .gguf file of a model; what is neither here nor in a cache is downloaded."""
    return _locate(name, progress, refresh=False)


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """As resolve_model, but a repository of the hub is compared with the hub's newest state even when it is cached."""
    return _locate(name, progress, refresh=True)


def _locate(name: str, progress: Progress | None, *, refresh: bool) -> Path:
    packaged = PACKAGED_MODELS.get(name)
    if packaged is not None:
        return find_packaged(packaged) or fetch_packaged(name, packaged, progress)
    path = Path(name).expanduser()
    if name and os.path.exists(path):  # unlike Path.exists() also False for names no file can have
        return path
    match = HUB_NAME.fullmatch(name)
    # "folder/file.gguf" is a path that does not exist, not the repository "file.gguf" of an owner "folder".
    if match is None or (match["file"] is None and name.endswith(".gguf")):
        known = ", ".join(PACKAGED_MODELS)
        raise ModelError(
            f"model {name!r} not found: give a known name ({known}), a model directory, "
            "a .gguf file, or ORG/NAME of the Hugging Face hub"
        )
    repository = HubRepository(match["repository"], match["revision"], match["file"])
    cached = None if refresh else repository.cached()
    return cached or repository.download(progress)


@dataclass(frozen=True)
class HubRepository:
    """A repository of the hub, perhaps at a revision or narrowed to one GGUF file: ORG/NAME@REVISION:FILE.gguf."""

    repository: str
    revision: str | None
    file: str | None

    def model_in(self, snapshot: Path) -> Path | None:
        """The model in a snapshot folder if all of it is there: the folder itself, or its GGUF file."""
        if self.file is not None:
            whole = all(part.is_file() for part in part_paths(snapshot / self.file))
            return snapshot / self.file if whole else None
        if (snapshot / "config.json").is_file():
            if (snapshot / INDEX_NAME).is_file():
                try:
                    shards = read_json_object(snapshot / INDEX_NAME).get("weight_map")
                except WeightsError:
                    return None
                whole = isinstance(shards, dict) and all(
                    (snapshot / str(file)).is_file() for file in set(shards.values())
                )
                return snapshot if whole else None
            if (snapshot / SINGLE_NAME).is_file():
                return snapshot
        files = sorted(snapshot.glob("*.gguf"))
        first = files[0] if len(files) == 1 else first_part(files)
        return first if first is not None and all(part.is_file() for part in part_paths(first)) else None

    def cached(self) -> Path | None:
        """The model if the hub's cache on this machine has all of it."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            snapshot = snapshot_download(self.repository, revision=self.revision, local_files_only=True)
        except (LocalEntryNotFoundError, OSError, ValueError):
            return None
        return self.model_in(Path(snapshot))

    def download(self, progress: Progress | None) -> Path:
        """Download what octavo reads of the repository, and nothing else."""
        from huggingface_hub import HfApi, constants, snapshot_download

        info = self.asking_hub(lambda: HfApi().model_info(self.repository, revision=self.revision, files_metadata=True))
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
        wanted = self.wanted(sorted(sizes))
        total = sum(sizes[file] for file in wanted)
        blobs = Path(constants.HF_HUB_CACHE) / f"models--{self.repository.replace('/', '--')}" / "blobs"
        with reporting_growth(blobs, self.repository, total, progress), quiet_hub():
            snapshot = self.asking_hub(
                lambda: snapshot_download(
                    self.repository, revision=info.sha, allow_patterns=[glob.escape(file) for file in wanted]
                )
            )
        model = self.model_in(Path(snapshot))
        if model is None:
            raise DownloadError(f"{self.repository}: the download in {snapshot} is incomplete; pull it again")
        return model

    def wanted(self, files: list[str]) -> list[str]:
        """The files to download: configuration, tokenizer, and one form of the weights."""
        if self.file is not None:
            if self.file not in files:
                raise DownloadError(f"{self.repository}: has no file {self.file!r}")
            return [str(part) for part in part_paths(Path(self.file))]
        described = [file for file in (*CONFIG_FILES, *TOKENIZER_FILES) if file in files]
        if "config.json" in files and (INDEX_NAME in files or SINGLE_NAME in files):
            shards = [SINGLE_NAME] if INDEX_NAME not in files else [INDEX_NAME, *shard_files(files)]
            return [*described, *shards]
        quantised = [file for file in files if file.endswith(".gguf")]
        if len(quantised) == 1 or first_part([Path(file) for file in quantised]) is not None:
            return quantised
        if quantised:
            some = ", ".join(quantised[:8])
            raise DownloadError(
                f"{self.repository}: has {len(quantised)} .gguf files ({some}); name one as {self.repository}:FILE.gguf"
            )
        raise DownloadError(f"{self.repository}: has neither {SINGLE_NAME} (or shards of it) nor a .gguf file")

    def asking_hub(self, ask: Callable[[], Any]) -> Any:
        """The answer of a call to the hub, every way it can fail being a DownloadError of one line."""
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

        try:
            return ask()
        except GatedRepoError as error:
            raise DownloadError(
                f"{self.repository}: access is restricted; accept its terms on the hub and set HF_TOKEN"
            ) from error
        except RevisionNotFoundError as error:
            raise DownloadError(f"{self.repository}: has no revision {self.revision!r}") from error
        except RepositoryNotFoundError as error:
            raise DownloadError(
                f"{self.repository}: no such repository on the hub, or a private one (then set HF_TOKEN)"
            ) from error
        except Exception as error:  # the hub's client raises classes of whichever HTTP library it was built on
            first = _first_cause(error)
            reason = (str(first).strip().splitlines() or [type(first).__name__])[0][:200]
            raise DownloadError(
                f"{self.repository}: the hub could not be asked ({reason}); check the network, or give "
                "a local directory or .gguf file"
            ) from error


def _first_cause(error: BaseException) -> BaseException:
    """What the others were raised for; HTTP libraries wrap it several times, each time in more words."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def shard_files(files: list[str]) -> list[str]:
    """The shards the index speaks of, as they are named everywhere."""
    return [file for file in files if re.fullmatch(r"model-\d+-of-\d+\.safetensors", file)]


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Keep the hub client's own progress bars off while octavo shows its own."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
