"""Options that are whole numbers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from visionfast.errors import OptionError
from visionfast.whole_numbers import MAX_THREADS, checked_threads, checked_whole


@given(st.integers(), st.integers(1, 2**40))
@example(0, 1)
@example(1, 1)
@example(2, 1)
@example(10**20, 1024)
def test_the_range(value: int, most: int) -> None:
    if 1 <= value <= most:
        assert checked_whole("streams", value, most) == value
    else:
        with pytest.raises(OptionError, match=f"^streams: expected a whole number from 1 to {most}, got {value}$"):
            checked_whole("streams", value, most)


@pytest.mark.parametrize("value", [True, False, "2", 2.5, 2.0, float("nan"), None, [2], np.float32(2)])
def test_what_is_no_whole_number(value: object) -> None:
    with pytest.raises(
        OptionError, match=re.escape(f"batch: expected a whole number from 1 to 9 (why), got {value!r}")
    ):
        checked_whole("batch", value, 9, "why")


def test_numpys_whole_numbers_are_some() -> None:
    number = checked_whole("batch", np.int16(3), 9)
    assert (number, type(number)) == (3, int)


def test_threads() -> None:
    assert checked_threads(None) is None
    assert checked_threads(MAX_THREADS) == MAX_THREADS
    for threads in (0, -1, 10**20, True):
        with pytest.raises(OptionError, match="threads: expected a whole number from 1 to"):
            checked_threads(threads)
