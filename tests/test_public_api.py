"""The public names of the package: complete, lazily imported, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import octavo


def test_all_equals_the_names_that_can_be_imported_lazily() -> None:
    assert set(octavo.__all__) == {*octavo._HOMES, "__version__"}
    assert octavo.__all__ == sorted(octavo.__all__, key=lambda name: (not name.isupper(), name.startswith("_"), name))
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
        assert name in dir(octavo)


def test_an_unknown_name_is_an_attribute_error() -> None:
    try:
        octavo.LLMM  # noqa: B018
    except AttributeError as error:
        assert "LLMM" in str(error)
    else:
        raise AssertionError("no AttributeError")


def test_import_of_the_package_imports_nothing_heavy() -> None:
    code = "import sys, octavo; print(*(name for name in sys.modules if name.split('.')[0] in HEAVY or '.' in name))"
    code = "HEAVY = {'numpy', 'tokenizers', 'jinja2', 'asyncio', 'importlib.metadata'}; " + code
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in loaded if name.startswith(("numpy", "tokenizers", "jinja2", "asyncio", "octavo."))] == []
    assert "importlib.metadata" not in loaded
