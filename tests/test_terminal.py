"""Text of others on its way to a terminal."""

from __future__ import annotations

import os
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from visionfast.terminal import one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("näher 東京 \u00a0\u3000.jpg", "näher 東京 \u00a0\u3000.jpg"),
        ("C:\\x1b", "C:\\x1b"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\nb\r\nc\td\x0b\x0c\x1c\x85\u2028\u2029", "a\\nb\\r\\nc\\td\\x0b\\x0c\\x1c\\x85\\u2028\\u2029"),
        ("gpj.\u202eexe.jpg", "gpj.\\u202eexe.jpg"),
        ("\u2066\u2069\u200e\u200f\u061c", "\\u2066\\u2069\\u200e\\u200f\\u061c"),
        ("a\u200bb\ufeff\U000e0041", "a\\u200bb\\ufeff\\U000e0041"),
        (os.fsdecode(b"bad\xff\x80.jpg"), "bad\\xff\\x80.jpg"),
        ("\ud800", "\\ud800"),
        ("👩\u200d🔬 می\u200cخواهم", "👩\u200d🔬 می\u200cخواهم"),
    ],
)
def test_what_is_written_out(text: str, shown: str) -> None:
    assert one_line(text) == shown


@given(st.text(st.characters(codec=None)))
@example("".join(map(chr, range(0xA0))))
@example("\u202e\u2028\udcff\ud800")
def test_no_terminal_obeys_what_is_left(text: str) -> None:
    shown = one_line(text)
    assert len(shown.splitlines()) <= 1
    assert not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in shown)
    embeddings = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    assert not any(unicodedata.bidirectional(c) in embeddings for c in shown)
    shown.encode()
    assert one_line(shown) == shown


@given(st.text(st.characters(categories=("L", "N", "P", "S", "Zs"))))
def test_what_is_only_shown_stays(text: str) -> None:
    assert one_line(text) == text
