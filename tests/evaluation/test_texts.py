"""Texts come from files or with octavo; what is no text is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.evaluation.texts import beginning, read_text


def test_two_texts_come_with_octavo_and_share_nothing() -> None:
    first, second = read_text("builtin", "calibration"), read_text("builtin")
    assert (first.name, second.name) == ("builtin calibration", "builtin evaluation")
    assert len(first.content) > 100_000
    assert len(second.content) > 50_000
    lines = {line for line in first.content.splitlines() if len(line) > 80}
    assert not lines & set(second.content.splitlines())


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Grüße\n")
    text = read_text(str(tmp_path / "a.txt"))
    assert (text.name, text.content) == ("a.txt", "Grüße\n")


@pytest.mark.parametrize(
    ("content", "message"), [(b"ab\xff\xfe", r"is not UTF-8 text \(byte 2\)"), (b" \n\n", "holds no text")]
)
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_text(str(tmp_path / "a.txt"))


def test_a_missing_file_is_refused_and_builtin_offered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*'builtin'"):
        read_text(str(tmp_path / "none.txt"))


def test_what_a_tokenizer_begins_texts_with_is_found() -> None:
    assert beginning(lambda text: [1, 2, ord(text[0])]) == [1, 2]
    assert beginning(lambda text: [ord(text[0])]) == []
