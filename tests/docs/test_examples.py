"""The programs shown to users run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWN = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]
EXAMPLES = [pytest.param(path.read_text(), id=path.name) for path in sorted((ROOT / "examples").glob("*.py"))]


@pytest.mark.parametrize("code", [*SHOWN, *EXAMPLES])
def test_a_program_shown_to_users_runs(code: str, smollm2_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
