"""The model of docs/scale.md: its tables are those of the page, and it follows from the costs."""

from dataclasses import replace

import pytest

from benchmarks.scale_model import PAGE, Costs, Need, Workload, filled, needs, tables


def test_the_page_has_the_models_tables() -> None:
    """Computed from the latest costs; if they have changed: python -m benchmarks.scale_model."""
    page = PAGE.read_text()
    assert filled(page, tables(Workload(), Costs())) == page


def by_part(load: Workload) -> dict[str, Need]:
    """Return the needs by part."""
    return {need.part: need for need in needs(load, Costs())}


def test_twice_the_commits_need_twice_the_scheduler_and_no_more_executors() -> None:
    """What counts txids grows with them; what counts rows does not, if as many rows come."""
    usual, twice = by_part(Workload()), by_part(replace(Workload(), commits_per_second=20))
    for part in ("the scheduler of Airflow", "triggerers", "Spark's driver"):
        assert twice[part].needs == pytest.approx(2 * usual[part].needs)
    assert twice["executors"].needs == usual["executors"].needs
    assert [need.share for need in needs(Workload(), Costs())] == sorted((n.share for n in usual.values()), reverse=True)
