"""Reads Grafana boards: their queries, and the names of series in a query."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BOARD = ROOT / "deploy/grafana/octavo.json"

# Names of series stand where no function or keyword of PromQL can: they have an underscore or a colon.
_NAME = re.compile(r"\b[a-z][a-z0-9]*(?:[:_][a-z0-9_:]*)\b(?!\s*\()")


def load(path: Path) -> dict[str, Any]:
    board: dict[str, Any] = json.loads(path.read_text())
    return board


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels with queries, those in rows included."""
    found = []
    for panel in board["panels"]:
        found += [panel, *panel.get("panels", [])]
    return [panel for panel in found if panel["type"] != "row"]


def queries(board: dict[str, Any]) -> list[str]:
    """Every query of the panels and the annotations."""
    found = [target["expr"] for panel in panels(board) for target in panel["targets"]]
    return found + [item["expr"] for item in board["annotations"]["list"] if "expr" in item]


def names(query: str) -> set[str]:
    """The series a query reads."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(?:by|without|on|ignoring)\s*\([^)]*\)", " ", query)
    return set(_NAME.findall(bare))


def filled(query: str, window: str) -> str:
    """A query as Grafana sends it, for all models and instances."""
    query = query.replace('="$model_name"', '=~".+"').replace('"$instance"', '".*"')
    return query.replace("$__rate_interval", window)
