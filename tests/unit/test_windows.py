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
    """Declare a pipeline with this window."""
    state = State(**{"key": {"name": "text"}, "aggregates": {"lines": Count()}, "window": window, **changes})
    return Pipeline("inbox", SOURCE, {"per_name": state}).spec


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("1 second", 1), ("90 seconds", 90), ("15 minutes", 900), ("1 hour", 3600), ("2 days", 172_800), ("1 week", 604_800)],
)
def test_lengths_are_texts_or_timedeltas(given: str, seconds: int) -> None:
    """Both mean the same."""
    assert Tumbling("at", given).spec == Tumbling("at", timedelta(seconds=seconds)).spec
    assert Tumbling("at", given).spec.size == seconds * SECOND


def test_an_offset_is_taken_within_the_distance_of_windows() -> None:
    """Offsets that mean the same windows are the same declaration."""
    assert Tumbling("at", "1 hour", offset="61 minutes").spec == Tumbling("at", "1 hour", offset="1 minute").spec
    assert Sliding("at", "1 hour", "15 minutes", offset="16 minutes").spec.offset == 60 * SECOND


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: Tumbling("at", "1 month"), "Tumbling('at'): '1 month' is no duration"),
    (lambda: Tumbling("at", "an hour"), "Write size as a whole number and a unit"),
    (lambda: Tumbling("at", "-1 hour"), "is no duration"),
    (lambda: Tumbling("at", "1.5 hours"), "is no duration"),
    (lambda: Tumbling("at", "0 hours"), "use at least 1 microsecond"),
    (lambda: Tumbling("at", "400000 days"), "at most 366000 days"),
    (lambda: Tumbling("at", timedelta(seconds=-1)), "use at least 1 microsecond"),
    (lambda: Tumbling("at", "1 hour", emit_final=True), "emit_final needs final_after"),
    (lambda: Tumbling("at", "1 hour", type="date"), "has type='date'; use timestamptz or timestamp"),  # type: ignore[arg-type]
    (lambda: Sliding("at", "1 hour", "25 minutes"), "has to be a multiple of `every`, 25 minutes"),
    (lambda: Sliding("at", "15 minutes", "1 hour"), "has to be a multiple of `every`"),
    (lambda: Sliding("at", "1 day", "1 second"), "each row would be in 86400 windows; 1000 are possible"),
    (lambda: Session("at", "0 seconds"), "gap is 0 seconds; use at least 1 microsecond"),
    (lambda: declare(Session("at", "1 hour"), kind="opaque"), "State per_name cannot have sessions and be opaque"),
    (lambda: declare(Session("at", "1 hour"), kind="opaque", changes=True), "cannot have sessions and be opaque"),
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
    (
        lambda: Tumbling("at", "1 hour", final_after="1 hour", keep="ever"),
        "'ever' is no duration. Write keep as a whole number",
    ),
    (lambda: declare(Tumbling("at", "1 hour"), key={"window_start": "text"}), "has two columns named window_start"),
    (lambda: declare(Tumbling("at", "1 hour"), aggregates={"corrections": Count()}), "has two columns named corrections"),
]


@pytest.mark.promise("limit:MOST_PER_ROW")
@pytest.mark.parametrize(("declared", "message"), BAD, ids=[message for _, message in BAD])
def test_a_window_that_cannot_work_is_refused_at_once(declared: Callable[[], Any], message: str) -> None:
    """With what is wrong, and what is possible."""
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is compared as it stands
        declared()
    assert message in str(refused.value)


def test_a_length_of_another_type_is_refused() -> None:
    """A number has no unit."""
    with pytest.raises(TypeError, match="size is 3600; write it as text, such as '15 minutes', or as a timedelta"):
        Tumbling("at", 3600)  # type: ignore[arg-type]


def test_two_tables_of_one_name_are_refused() -> None:
    """Final windows have a table of their own."""
    window = Tumbling("at", "1 hour", final_after="1 hour", emit_final=True)
    states = {name: State(aggregates={"lines": Count()}, window=window) for name in ("x", "x_final")}
    with pytest.raises(ValueError, match="two tables named x_final"):
        Pipeline("inbox", SOURCE, states)


@pytest.mark.parametrize(
    "window",
    [
        Tumbling("at", "1 hour", offset="1 minute"),
        Sliding("at", "1 hour", "15 minutes", type="timestamp", final_after="0 hours", emit_final=True),
        Session("at", "1 hour", final_after="1 day"),
        None,
    ],
)
def test_the_ledger_has_the_whole_declaration(window: Window | None) -> None:
    """A spec that was read from there is the declared one, and has its fingerprint."""
    spec = declare(window)
    read = spec_of(spec.declaration)
    assert (read.states, read.fingerprint, read.tables) == (spec.states, spec.fingerprint, spec.tables)
    assert (spec.declaration["states"][0]["window"] is not None) == (window is not None)


def test_every_detail_of_a_window_is_part_of_the_fingerprint() -> None:
    """Each decides what a stored value means."""
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


def test_how_long_windows_are_kept_may_be_changed_at_any_time() -> None:
    """It decides which windows there are, not what one means."""
    kept: list[Window] = [
        Session("at", "1 hour", final_after="1 hour", keep=keep) for keep in (None, "1 hour", timedelta(days=9))
    ]
    assert len({declare(window).fingerprint for window in kept}) == 1
    assert [window.spec.keep for window in kept] == [None, 3_600_000_000, 9 * 86_400_000_000]


@pytest.mark.parametrize("window", [Session("at", "30 minutes"), Tumbling("at", "1 hour", final_after="1 hour")])
def test_batches_that_depend_on_the_one_before_are_merged_one_by_one(window: Window) -> None:
    """What a session becomes, and what is late, is decided between two batches."""
    assert declare(window).commits_alone
    assert not declare(Tumbling("at", "1 hour")).commits_alone
