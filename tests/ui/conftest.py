"""Fixtures of the tests of the page: a running server and a browser, one of each for a module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import RunningServer, server
from tests.ui.browser import Browser, find_browser

__all__ = ["browser", "page", "server"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser. Where there is none the tests are skipped, unless OCTAVO_REQUIRE_BROWSER says that there must be."""
    program = find_browser()
    if program is None:
        missing = "no Chromium is installed: scripts/install-browser does it"
        if os.environ.get("OCTAVO_REQUIRE_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    profile: Path = tmp_path_factory.mktemp("profile")
    with Browser(program, profile) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Browser]:
    """The browser with the page freshly loaded; at the end nothing may have gone wrong in it."""
    browser.show_as(1280, 860)
    browser.open(server.url + "/")
    browser.evaluate("localStorage.clear(); sessionStorage.clear()")
    browser.open(server.url + "/?fresh")
    browser.wait_for("document.querySelector('#model').value")
    browser.problems.clear()
    yield browser
    browser.evaluate("1")  # takes in what happened last
    assert browser.problems == []
