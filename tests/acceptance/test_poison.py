"""One bad record among many is set aside, every other record counts, and the replay counts that one.

tests/jobs/test_policies.py tells of every policy, with few records. Here are 20,000,
or ten million if ``SOAK`` is set, as `make soak` does.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tidegate.jobs import Count, Files, Pipeline, State, Sum
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore

RECORDS = 10_000_000 if os.environ.get("SOAK") else 20_000
FILES = 4  # one to a batch, and all of them processed at once
PER_FILE = RECORDS // FILES
BAD_TXID, BAD_POSITION, BAD_SHOP = 2, PER_FILE // 2, "shop 7"
ORIGIN = f"{BAD_TXID}.csv, line {BAD_POSITION + 2}"  # lines count from 1, and the first is the header
PER_SHOP = {"per_shop": State(key={"shop": "text"}, aggregates={"sold": Count(), "cents": Sum("cents")})}

WRITE = """
    COPY (
        SELECT CASE WHEN i = {bad} THEN '{shop}' ELSE 'shop ' || (i * 7919 + {number}) % 997 END AS shop,
               CASE WHEN i = {bad} THEN 'ten' ELSE ((i * 31 + {number}) % 1000)::VARCHAR END AS cents
        FROM range({records}) AS t(i)
    ) TO '{folder}/{number}.csv' (HEADER)
"""
GOOD_RECORDS = """
    SELECT shop, count(*), sum(try_cast(cents AS INT))::BIGINT FROM read_csv(?, header = true, all_varchar = true)
    WHERE try_cast(cents AS INT) >= 0 GROUP BY shop
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of files, the second with one bad record in its middle."""
    path = tmp_path_factory.mktemp("poison")
    for number in range(1, FILES + 1):
        bad = BAD_POSITION if number == BAD_TXID else -1
        duckdb.execute(WRITE.format(folder=path, bad=bad, shop=BAD_SHOP, number=number, records=PER_FILE))
    yield path
    for file in path.iterdir():
        file.unlink()  # they may be large, and pytest would keep them


def transform_of_text(rows: Any) -> Any:
    """Read cents that are not a number as zero."""
    return rows.selectExpr("shop", "coalesce(try_cast(cents AS int), 0) AS cents")


TEXT = {"schema": {"shop": "string", "cents": "string"}, "transform": transform_of_text}


def test_quarantine_sets_one_record_aside_and_a_replay_counts_it(
    settings: Settings, register: Callable[..., None], folder: Path
) -> None:
    """The others count at once; once the pipeline is fixed, the replay is a batch of that one record."""

    def run(run_id: str, version: int, *, schema: Any = None, **changes: Any) -> list[int]:
        source = Files(str(folder), glob="*.csv", format="csv", schema=schema or {"shop": "string", "cents": "int"})
        quick = {"concurrency": FILES, "tries": 2, "retry_delay_seconds": 0}
        pipeline = Pipeline("shops", source, PER_SHOP, on_poison="quarantine", version=version, **quick, **changes)
        register(pipeline)
        if version > 1:
            assert store.replay_quarantined(pipeline.spec, "a person", "it was right") == (FILES + 1, 1)
        return run_pipeline(settings, pipeline, run_id=run_id).txids

    def counted() -> dict[str, tuple[int, int]]:
        return {row["shop"]: (row["sold"], row["cents"]) for row in store.state_rows(PER_SHOP["per_shop"].spec("per_shop"))}

    good = {shop: (sold, sum_) for shop, sold, sum_ in duckdb.execute(GOOD_RECORDS, [f"{folder}/*.csv"]).fetchall()}
    assert sum(sold for sold, _ in good.values()) == RECORDS - 1
    with StateStore.connect(settings) as store:
        assert run("first", 1) == [1, 2, 3, 4]
        assert counted() == good
        waiting = [(record["txid"], record["origin"], record["payload"]) for record in store.quarantined("shops")]
        assert waiting == [(BAD_TXID, ORIGIN, f"{BAD_SHOP},ten")]
        (attempt,) = store.batch_history("shops", BAD_TXID).attempts
        assert (attempt["source_rows"], attempt["quarantined_rows"]) == (PER_FILE, 1)

        assert run("second", 2, **TEXT) == [5]
        assert list(store.quarantined("shops")) == []
        sold, sum_ = good[BAD_SHOP]
        assert counted() == {**good, BAD_SHOP: (sold + 1, sum_)}
