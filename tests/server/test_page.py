"""The files of the page for browsers: small, complete, and with headers that keep everything else out."""

from __future__ import annotations

import re

from tests.server.running import RunningServer


def test_the_whole_page_is_small(server: RunningServer) -> None:
    """Every file that the page names, and that those files name."""
    sizes: dict[str, int] = {}
    with server.client() as http:
        found = ["index.html"]
        while found:
            name = found.pop()
            answer = http.get(f"/ui/{name}")
            assert answer.status_code == 200, name
            sizes[name] = len(answer.content)
            named = re.findall(r"(?:/ui/|\./)([\w]+\.\w+)", answer.text)
            found += sorted({other for other in named if other not in sizes and other not in found})
    assert {"style.css", "theme.js", "app.js", "playground.js", "chart.js", "icon.svg"} <= set(sizes)
    assert sum(sizes.values()) < 60_000


def test_browsers_get_the_page_and_others_what_they_ask_for(server: RunningServer) -> None:
    browsers = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    with server.client() as http:
        page = http.get("/", headers={"Accept": browsers})
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "Accept" in page.headers["vary"]
        assert http.get("/").content == b""  # TGI's health
        answer = http.post(
            "/", json={"inputs": "Hi", "parameters": {"max_new_tokens": 2}}, headers={"Accept": browsers}
        )
        assert "generated_text" in answer.text
        assert http.get("/ui/missing.js").status_code == 404
        assert http.get("/ui/..%2fpage.py").status_code == 404


def test_files_come_with_a_strict_policy_and_are_asked_for_again_only_when_they_changed(server: RunningServer) -> None:
    with server.client() as http:
        for path in ("/ui/index.html", "/ui/app.js", "/ui/style.css", "/ui/icon.svg"):
            answer = http.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = http.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")


def test_no_script_or_style_stands_in_the_page(server: RunningServer) -> None:
    with server.client() as http:
        text = http.get("/", headers={"Accept": "text/html"}).text
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|javascript:", text) == []
    assert re.findall(r"https?://(?!www\.w3\.org)", text) == []
