"""The public names of the package: complete, lazily imported, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

import octavo


def test_all_equals_the_names_that_can_be_imported_lazily() -> None:
    assert set(octavo.__all__) == {*octavo._HOMES, "__version__"}
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
        assert name in dir(octavo)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="LLMM"):
        octavo.LLMM  # noqa: B018


def test_import_of_the_package_imports_nothing_heavy() -> None:
    # In a fresh interpreter, since other tests have imported everything.
    code = "import sys; before = set(sys.modules); import octavo; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in loaded if name.startswith("octavo")] == ["octavo"]
    assert {name.partition(".")[0] for name in loaded} <= {"octavo", *sys.stdlib_module_names}
    assert not {"asyncio", "importlib.metadata", "logging", "json"} & set(loaded)
