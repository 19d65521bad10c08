"""Half an hour of mixed load with an engine that is killed again and again: not one wrong or lost answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_answer_is_right_through_kills_and_bad_clients(tmp_path: Path) -> None:
    words = [sys.executable, str(BENCHMARKS / "soak.py"), "--minutes", "30", "--json", str(tmp_path / "soak.json")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
