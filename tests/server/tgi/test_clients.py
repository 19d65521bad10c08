"""Published clients of TGI, unmodified, against the server: `text-generation` 0.7.0 and huggingface_hub's two forms."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.running import RunningServer
from tests.server.tgi.client_env import text_generation_python

CLIENTS = Path(__file__).parent / "clients"
SCRIPTS = {
    "text-generation": ("text_generation_client.py", text_generation_python),
    "huggingface_hub before 1.0": ("inference_client.py", text_generation_python),
    "huggingface_hub": ("inference_client.py", lambda: Path(sys.executable)),
}


def checks() -> list[tuple[str, str]]:
    """Every check of every client."""
    return [
        (client, name)
        for client, (script, _) in SCRIPTS.items()
        for name in re.findall(r"^(?:async )?def (check_\w+)", (CLIENTS / script).read_text(), re.M)
    ]


@pytest.fixture(scope="module")
def outcome(server: RunningServer) -> Callable[[str, str], str | None]:
    """What a check of a client failed on, None when it passed; each client's script runs once."""
    found: dict[str, dict[str, str | None]] = {}

    def look(client: str, check: str) -> str | None:
        if client not in found:
            script, python = SCRIPTS[client]
            environment = {"PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
            run = subprocess.run(
                [str(python()), str(CLIENTS / script), server.url],
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert run.returncode == 0, run.stderr
            results = [json.loads(line) for line in run.stdout.splitlines()]
            found[client] = {result["check"]: result["failure"] for result in results}
        return found[client].get(check, "it did not run")

    return look


@pytest.mark.parametrize(("client", "check"), checks())
def test_client(outcome: Callable[[str, str], str | None], client: str, check: str) -> None:
    failure = outcome(client, check)
    assert failure is None, failure


@pytest.mark.parametrize("place", [0, 1])
def test_the_programs_of_the_documentation_run(server: RunningServer, place: int) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tgi.md").read_text()
    program = re.findall(r"```py\n(.*?)```", page, re.S)[place].replace("http://127.0.0.1:8080", server.url)
    run = subprocess.run(
        [str(text_generation_python()), "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "Paris" in run.stdout
