"""The types that mypy checks the native module's users against are those of the module."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from octavo import _native

STUB = Path(__file__).parents[2] / "src/octavo/_native.pyi"
REMEDY = "run scripts/dev-build and scripts/native-stub"


def public(owner: Any) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """The public names a module or class of the stub declares."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            found[ast.unparse(target)] = node
    return {name: node for name, node in found.items() if not name.startswith("_") or name == "__init__"}


def parameters(signature: str) -> list[str]:
    """The parameter names of ``def f(self, a: int, b: ndarray[shape=(*)] = None) -> int`` in order."""
    inside = signature.split(") ->")[0]
    while "[" in inside:
        inside = re.sub(r"\[[^\[\]]*\]", "", inside)
    return re.findall(r"[(,] ?(\w+)", inside)


def test_the_stub_names_what_the_module_has() -> None:
    stub = declared(ast.parse(STUB.read_text()).body)
    assert set(stub) == public(_native), REMEDY
    for name, node in stub.items():
        if isinstance(node, ast.ClassDef):
            members = declared(node.body).keys() - {"__init__"}
            assert members == public(getattr(_native, name)), f"{name}: {REMEDY}"


def test_the_stub_gives_every_method_its_parameters() -> None:
    for name, node in declared(ast.parse(STUB.read_text()).body).items():
        if not isinstance(node, ast.ClassDef):
            continue
        for method, definition in declared(node.body).items():
            function = vars(getattr(_native, name)).get(method)
            signatures = getattr(function, "__nb_signature__", None)
            if signatures and isinstance(definition, ast.FunctionDef):
                given = [argument.arg for argument in definition.args.posonlyargs + definition.args.args]
                assert given == parameters(signatures[0][0]), f"{name}.{method}: {REMEDY}"
