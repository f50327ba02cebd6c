"""What a job says on stderr where nobody watches."""

from __future__ import annotations

import pytest

from visionfast.embed_progress import lines, shown


def test_a_line_from_time_to_time(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    progress = lines(30, clock=lambda: now)

    def told(at: float, stage: str, done: int, total: int | None) -> str:
        nonlocal now
        now = at
        progress(stage, done, total)
        return capsys.readouterr().err

    assert told(29, "listing", 20_000, None) == ""
    assert told(31, "listing", 23_000, None) == "visionfast: listing 23000 files\n"
    assert told(40, "embedding", 100, 900) == ""  # of an earlier run
    assert told(61, "embedding", 310, 900) == "visionfast: embedding 310/900, 10.0 images/s\n"
    assert told(90, "embedding", 370, 900) == ""
    assert told(91, "embedding", 370, 900) == "visionfast: embedding 370/900, 2.0 images/s\n"
    assert told(121, "embedding", 370, 900) == "visionfast: embedding 370/900, 0.0 images/s\n"
    assert told(200, "writing", 900, 900) == "visionfast: writing 900/900\n"


def test_a_short_job_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with shown() as progress:
        progress("embedding", 1, 1)
    assert capsys.readouterr().err == ""
