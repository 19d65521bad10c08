"""An environment of its own for the client `text-generation`, whose requirements exclude those of the tests.

Made once with venv and pip below build/, and again when the requirements change.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["text_generation_python"]

ROOT = Path(__file__).parents[3]
REQUIREMENTS = ("text-generation==0.7.0", "huggingface_hub<1.0")


def text_generation_python() -> Path:
    """The interpreter of the environment."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    directory = ROOT / "build" / f"client-env-py{version}"
    directory.parent.mkdir(exist_ok=True)
    python = directory / "bin" / "python"
    done = directory / "requirements.txt"
    wanted = "\n".join(REQUIREMENTS)
    with Path(f"{directory}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test runs may want it at once
        if not done.is_file() or done.read_text() != wanted:
            shutil.rmtree(directory, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
            done.write_text(wanted)
    return python
