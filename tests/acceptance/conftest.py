"""A small pipeline over real files, and its oracle."""

from pathlib import Path

import duckdb

from tidegate.jobs import Count, Files, Max, Min, Pipeline, State, Sum
from tidegate.state_store import Settings, StateStore

AGGREGATES = {"sold": Count(), "cents": Sum("cents"), "least": Min("cents"), "most": Max("cents")}
SALES = Pipeline(
    name="sales",
    source=Files("sales", glob="*.csv", format="csv", schema={"shop": "string", "cents": "int"}, max_files=2),
    states={"per_shop": State({"shop": "text"}, AGGREGATES)},
)


def write_sales(home: Path, *names: str) -> None:
    """Write sales files whose content follows from their names, with shared and with new keys in each."""
    folder = home / "sales"
    folder.mkdir(exist_ok=True)
    for name in names:
        number = int(name)
        shops = ("north", "south", f"new {number}", "S\u00e3o Paulo")
        rows = [f"{shop},{number * 10 + position}\n" for position, shop in enumerate(shops)]
        (folder / f"{name}.csv").write_text("shop,cents\n" + "".join(rows), encoding="utf-8")


def clean_state(home: Path) -> dict[str, tuple[int, int, int, int]]:
    """Let DuckDB compute the state from the raw files."""
    files = f"read_csv('{home}/sales/*.csv', header = true)"
    found = duckdb.sql(f"SELECT shop, count(*), sum(cents), min(cents), max(cents) FROM {files} GROUP BY shop").fetchall()
    return {shop: tuple(values) for shop, *values in found}


def stored_state(settings: Settings, pipeline: Pipeline = SALES) -> dict[str, tuple[int, int, int, int]]:
    """Read the state from Postgres."""
    with StateStore.connect(settings) as store:
        rows = store.state_rows(pipeline.spec.states[0])
        return {row["shop"]: (row["sold"], row["cents"], row["least"], row["most"]) for row in rows}
