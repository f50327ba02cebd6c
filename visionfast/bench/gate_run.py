"""The gate's measuring: who seems slower is measured again before it is said, and so is who was disturbed."""

from __future__ import annotations

from collections.abc import Callable

from visionfast.bench.gate import TOLERANCE, Verdict, compare
from visionfast.bench.records import Record

__all__ = ["ATTEMPTS", "decide"]

ATTEMPTS = 3
"""Runs at most: of three, two that are slower decide, and one that is not."""


def decide(
    baseline: Record,
    measure: Callable[[], Record],
    *,
    tolerance: float = TOLERANCE,
    attempts: int = ATTEMPTS,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[Verdict, Record]:
    """Measures until there is a verdict: `not slower` and `broken` at once, `slower` when a second run says so too.
    What no other run could mend is said after the first one.

    Args:
        baseline: to compare with.
        measure: makes one run.
        tolerance: of `gate.compare`.
        attempts: runs at most.
        tell: is told why it measures again.

    Returns:
        The verdict, and the run that it is of; where no two were slower and none was not, the last run's, withheld.

    Raises:
        OptionError, CertificateError: as `gate.compare`.
    """
    seemed_slower = False
    for attempt in range(1, attempts + 1):
        record = measure()
        verdict = compare(baseline, record, tolerance=tolerance)
        if verdict.is_final or verdict.status == "not slower" or (verdict.status == "slower" and seemed_slower):
            return verdict, record
        reason = verdict.withheld[0] if verdict.withheld else f"{verdict.slower[0]}, once"
        seemed_slower |= verdict.status == "slower"
        if attempt < attempts:
            tell(f"{reason}; measuring again")
    return Verdict(
        verdict.findings, verdict.withheld or (f"{reason}, and no other run was quiet",), verdict.notes
    ), record
