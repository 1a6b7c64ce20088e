"""Pipelines of the page's tests: a package of authors has `CLICKS`, and a broken one; no code declares `ORPHAN`."""

from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tests.checkout import write_package
from tidegate.jobs import Count, Files, Pipeline, Query, State, Sum

SPENT = {"clicks": Count(), "spent": Sum("cents", type="numeric(20,4)")}
CLICKS = Pipeline(
    name="clicks",
    source=Files("clicks", glob="*.csv", format="csv", schema={"page": "string", "cents": "string"}),
    states={"per_page": State({"page": "text", "day": "date"}, SPENT), "total": State(aggregates={"all_clicks": Count()})},
    description="Clicks <b>per page</b> & day",
    on_poison="quarantine",
)
BY_SHOP = State({"page": "text", "shop": "integer"}, {"clicks": Count()}, kind="opaque", null_keys=True)
BROKEN, ORPHAN = (
    Pipeline(name, Files(name, glob="*.csv", format="csv", schema={"page": "string"}), {f"per_{name}": state})
    for name, state in (("broken", State({"page": "text"}, {"clicks": Count()})), ("orphan", BY_SHOP))
)
REGISTERED = (CLICKS, BROKEN, ORPHAN)


def clicks_of(states: Any, least: int, pages: list[str]) -> Any:
    """Answer how often pages were clicked, with a value of each kind that JSON has no number for."""
    page = states["clicks.per_page"].c
    wanted = sa.select(sa.func.coalesce(sa.func.sum(page.clicks), 0).label("clicks"), sa.literal(least).label("least"))
    days = sa.func.array_agg(sa.cast(page.day, sa.Date)).label("days")
    return wanted.add_columns(days, sa.cast(sa.literal(2**60), sa.BigInteger).label("large")).where(page.page.in_(pages))


def of_both(states: Any) -> Any:
    counts = (sa.select(sa.func.count()).select_from(states[name]).scalar_subquery() for name in states)
    return sa.select(*(count.label(f"rows_{number}") for number, count in enumerate(counts)))


QUERIES = [
    Query("clicks_of", clicks_of, reads=["clicks.per_page"], arguments={"least": "integer", "pages": "text[]"}),
    Query("of_both", of_both, reads=["clicks.per_page", "broken.per_broken"], timeout_seconds=600),
]


def write_authors(folder: Path) -> None:
    """Write another package that declares clicks, and broken, whose module raises."""
    write_package(folder, clicks="tests.page.pipelines:CLICKS", broken="broken_pipeline:BROKEN")
    (folder / "broken_pipeline.py").write_text("raise RuntimeError('this module cannot be imported')\n")
