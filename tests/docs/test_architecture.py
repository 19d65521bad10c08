"""The map of the project names every folder and module there is, and none that is not; links between pages work."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def modules_in_tree() -> dict[str, list[str]]:
    """Folder by folder, the modules it holds."""
    found: dict[str, set[str]] = {}
    for base, suffixes in (("src/octavo", {".py"}), ("native", {".cpp", ".h"})):
        for path in (ROOT / base).rglob("*"):
            # Families are listed in docs/models.md, by scripts/models-page.
            if path.suffix in suffixes and path.stem != "__init__" and path.parent.name != "families":
                found.setdefault(path.parent.relative_to(ROOT).as_posix(), set()).add(path.stem)
    return {folder: sorted(modules) for folder, modules in sorted(found.items())}


def modules_on_map() -> dict[str, list[str]]:
    """The same as docs/architecture.md tells it."""
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \|$", (ROOT / "docs/architecture.md").read_text(), re.M)
    return {folder: modules.split() for folder, modules in rows}


def test_the_map_matches_the_tree() -> None:
    tree, listed = modules_in_tree(), modules_on_map()
    wrong = {folder: modules for folder, modules in tree.items() if listed.get(folder) != modules}
    assert wrong == {}, "docs/architecture.md must list: " + "; ".join(
        f"`{folder}`: {' '.join(modules)}" for folder, modules in wrong.items()
    )
    assert sorted(listed) == sorted(tree)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in PAGES[1:] if f"docs/{page.name}" not in readme] == []


TOP = {"cli", "ptq", "evaluation", "benchmarking", "server", "observability"}
ABOVE_BACKENDS = TOP | {"frontend", "engine"}
FLOORS = {
    "ptq": {"cli", "server", "observability"},
    "evaluation": TOP - {"evaluation"},
    "benchmarking": TOP - {"benchmarking"} | {"frontend", "engine"},
    "observability": {"cli", "ptq", "benchmarking", "server"},
    "frontend": TOP,
    "engine": TOP | {"frontend"},
    "planning": ABOVE_BACKENDS | {"backends", "models", "weights", "sampling"},
    "sampling": ABOVE_BACKENDS | {"models", "weights"},
    "models": ABOVE_BACKENDS | {"backends"},
    "weights": ABOVE_BACKENDS | {"backends", "models"},
    "quantization": ABOVE_BACKENDS | {"backends", "models"},
    "backends": ABOVE_BACKENDS,
}


@pytest.mark.parametrize("floor", sorted(FLOORS))
def test_a_floor_imports_none_above_it(floor: str) -> None:
    wrong = []
    for path in sorted((ROOT / "src/octavo" / floor).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} imports relatively"
                names = [node.module or ""]
            wrong += [f"{path.name}: {name}" for name in names if _floor(name) in FLOORS[floor]]
    assert wrong == []


def _floor(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == "octavo" and len(parts) > 1 else ""
