"""Text of others (names of files, messages, names of classes) on its way to a terminal, which obeys some of it."""

from __future__ import annotations

import re

__all__ = ["one_line"]

_OBEYED = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # C0 and C1: escape sequences (also the one byte \x9b), line breaks, tabs
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # bidirectional controls, which reorder what is read
    "\u2028\u2029"  # line and paragraph separator
    "\u00ad\u180e\u200b\u2060-\u2064\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # nothing is seen of them
    "\ud800-\udfff"  # bytes of a name that are no UTF-8, and what else no encoding has
    "]"
)
"""Not U+200C and U+200D, the joiners: Persian and emoji are spelled with them."""


def one_line(text: str) -> str:
    """The text as one line that a terminal only shows: what it would obey, or hide, is written out as an escape.

    `\\x1b[2J` for a terminal's own escape sequence, `\\n` for a line break, `\\u202e` for a change of direction (the
    controls of Unicode Standard Annex 9), `\\xff` for a byte of a file's name that is no UTF-8. All else, a backslash
    too, stays as it is; so this is for people's eyes, and JSON has its own escapes.
    """
    return _OBEYED.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    char = found[0]
    if "\udc80" <= char <= "\udcff":  # of a byte, as os.fsdecode has it
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode()
