"""Declarations of windows: lengths are read exactly, and what cannot be kept is refused."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.store import PipelineSpec, spec_of
from tidegate.jobs import Count, Files, Pipeline, Session, Sliding, State, Tumbling
from tidegate.jobs.windows import Window

SOURCE = Files("inbox", format="csv", schema={"name": "string", "at": "timestamp"})
SECOND = 1_000_000


def declare(window: Window | None, **changes: Any) -> PipelineSpec:
    state = State(**{"key": {"name": "text"}, "aggregates": {"lines": Count()}, "window": window, **changes})
    return Pipeline("inbox", SOURCE, {"per_name": state}).spec


@pytest.mark.parametrize(("given", "seconds"), [("90 seconds", 90), ("1 hour", 3600), ("1 week", 604_800)])
def test_lengths_are_texts_or_timedeltas(given: str, seconds: int) -> None:
    assert Tumbling("at", given).spec == Tumbling("at", timedelta(seconds=seconds)).spec
    assert Tumbling("at", given).spec.size == seconds * SECOND


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: Tumbling("at", "1 month"), "Tumbling('at'): '1 month' is no duration"),
    (lambda: Tumbling("at", "-1 hour"), "is no duration"),
    (lambda: Tumbling("at", "0 hours"), "use at least 1 microsecond"),
    (lambda: Tumbling("at", "1 hour", emit_final=True), "emit_final needs final_after"),
    # type: ignore[arg-type]
    (lambda: Sliding("at", "1 hour", "25 minutes"), "has to be a multiple of `every`, 25 minutes"),
    (lambda: Sliding("at", "1 day", "1 second"), "each row would be in 86400 windows; 1000 are possible"),
    (lambda: Session("at", "0 seconds"), "gap is 0 seconds; use at least 1 microsecond"),
    (lambda: declare(Session("at", "1 hour"), kind="opaque"), "State per_name cannot have sessions and be opaque"),
    (
        lambda: declare(Tumbling("at", "1 hour", final_after="1 hour", emit_final=True), kind="opaque", changes=True),
        "cannot record both its changes and its final windows",
    ),
    (
        lambda: Tumbling("at", "1 hour", keep="1 day"),
        "Tumbling('at'): keep needs final_after. A late row would begin a removed",
    ),
    (
        lambda: Session("at", "1 hour", final_after="2 days", keep="1 day"),
        "Session('at'): keep is 1 day, less than final_after, 2 days. A late row would begin a removed window from zero.",
    ),
    (lambda: declare(Tumbling("at", "1 hour"), key={"window_start": "text"}), "has two columns named window_start"),
]


@pytest.mark.promise("limit:MOST_PER_ROW")
@pytest.mark.parametrize(("declared", "message"), BAD, ids=[message for _, message in BAD])
def test_a_window_that_cannot_work_is_refused_at_once(declared: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is compared as it stands
        declared()
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "window",
    [
        Sliding("at", "1 hour", "15 minutes", type="timestamp", final_after="0 hours", emit_final=True),
        Session("at", "1 hour", final_after="1 day"),
        None,
    ],
)
def test_the_ledger_has_the_whole_declaration(window: Window | None) -> None:
    spec = declare(window)
    read = spec_of(spec.declaration)
    assert (read.states, read.fingerprint, read.tables) == (spec.states, spec.fingerprint, spec.tables)
    assert (spec.declaration["states"][0]["window"] is not None) == (window is not None)


def test_every_detail_of_a_window_is_part_of_the_fingerprint() -> None:
    final = {"final_after": "1 hour"}
    windows: list[Window] = [
        Tumbling("at", "1 hour"),
        Tumbling("at", "2 hours"),
        Tumbling("at", "1 hour", offset="1 minute"),
        Tumbling("at", "1 hour", type="timestamp"),
        Tumbling("at", "1 hour", **final),  # type: ignore[arg-type]
        Tumbling("at", "1 hour", **final, emit_final=True),  # type: ignore[arg-type]
        Session("at", "1 hour"),
        Sliding("at", "1 hour", "1 hour"),
        Sliding("at", "1 hour", "30 minutes"),
    ]
    assert len({declare(window).fingerprint for window in windows}) == len(windows)


@pytest.mark.parametrize("window", [Session("at", "30 minutes"), Tumbling("at", "1 hour", final_after="1 hour")])
def test_batches_that_depend_on_the_one_before_are_merged_one_by_one(window: Window) -> None:
    """What a session becomes, and what is late, is decided between two batches."""
    assert declare(window).commits_alone
    assert not declare(Tumbling("at", "1 hour")).commits_alone
