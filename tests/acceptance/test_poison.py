"""One bad record among many is set aside, every other record counts, and the replay counts that one.

tests/jobs/test_policies.py tells of every policy, with few records. Here are 20,000,
or ten million if ``SOAK`` is set, as `make soak` does.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.store import BatchHistory
from tidegate.jobs import Count, Files, Pipeline, State, Sum
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings, StateStore

RECORDS = 10_000_000 if os.environ.get("SOAK") else 20_000
FILES = 4  # one to a batch, and all of them processed at once
PER_FILE = RECORDS // FILES
BAD_TXID = 2
BAD_POSITION = PER_FILE // 2
BAD_LINE = BAD_POSITION + 2  # lines count from 1, and the first is the header
BAD_SHOP = "shop 7"
BAD_VALUES = {"does not parse": "ten", "fails the check": "-5"}
STRICT = {"cents are not negative": "cents >= 0"}
SHOPS = 997

Totals = dict[str, tuple[int, int]]  # how many records and how many cents, by shop

WRITE = """
    COPY (
        SELECT CASE WHEN i = {bad} THEN '{shop}' ELSE 'shop ' || (i * 7919 + {number}) % {shops} END AS shop,
               CASE WHEN i = {bad} THEN '{value}' ELSE ((i * 31 + {number}) % 1000)::VARCHAR END AS cents
        FROM range({records}) AS t(i)
    ) TO '{file}' (HEADER)
"""
GOOD_RECORDS = """
    SELECT shop, count(*), sum(try_cast(cents AS INT))::BIGINT FROM read_csv(?, header = true, all_varchar = true)
    WHERE try_cast(cents AS INT) >= 0 GROUP BY shop
"""


@dataclass(frozen=True)
class Folder:
    """Files, the second with one bad record in its middle."""

    path: Path
    bad_value: str

    @property
    def bad_file(self) -> Path:
        """Return the file that becomes the poisoned batch."""
        return self.path / f"{BAD_TXID}.csv"

    @property
    def bad_record(self) -> str:
        """Return the bad record's raw text."""
        return f"{BAD_SHOP},{self.bad_value}"

    def good_records(self, *txids: int) -> Totals:
        """Compute the state of these files' good records, with DuckDB."""
        files = [str(self.path / f"{txid}.csv") for txid in txids]
        return {shop: (sold, cents) for shop, sold, cents in duckdb.execute(GOOD_RECORDS, [files]).fetchall()}

    def all_records(self, cents_of_the_bad_one: int) -> Totals:
        """Compute the state of all records, the bad one with these cents."""
        state = self.good_records(*range(1, FILES + 1))
        assert sum(sold for sold, _ in state.values()) == RECORDS - 1
        sold, cents = state[BAD_SHOP]
        return {**state, BAD_SHOP: (sold + 1, cents + cents_of_the_bad_one)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Folder]]:
    """A folder for each kind of bad record; nothing changes it."""
    made = {kind: Folder(tmp_path_factory.mktemp("poison"), value) for kind, value in BAD_VALUES.items()}
    for folder in made.values():
        for number in range(1, FILES + 1):
            file, bad = folder.path / f"{number}.csv", BAD_POSITION if number == BAD_TXID else -1
            chosen = {"file": file, "bad": bad, "shop": BAD_SHOP, "value": folder.bad_value, "number": number}
            duckdb.execute(WRITE.format(**chosen, shops=SHOPS, records=PER_FILE))
        with folder.bad_file.open() as lines:
            assert next(line for position, line in enumerate(lines, 1) if position == BAD_LINE) == f"{folder.bad_record}\n"
    yield made
    for folder in made.values():
        for file in folder.path.iterdir():
            file.unlink()  # they may be large, and pytest would keep them


@dataclass
class Shops:
    """Pipeline `shops` over one of the folders."""

    settings: Settings
    register: Callable[..., None]
    folder: Folder
    pipeline: Pipeline

    def declare(self, **changes: Any) -> None:
        """Declare the pipeline, for the first time or again."""
        schema = changes.pop("schema", {"shop": "string", "cents": "int"})
        self.pipeline = Pipeline(
            name="shops",
            source=Files(str(self.folder.path), glob="*.csv", format="csv", schema=schema),
            states={"per_shop": State(key={"shop": "text"}, aggregates={"sold": Count(), "cents": Sum("cents")})},
            concurrency=FILES,
            tries=2,
            retry_delay_seconds=0,
            **changes,
        )
        self.register(self.pipeline)

    def run(self, run_id: str) -> list[int]:
        """Plan, process and commit all batches; return the txids."""
        return run_pipeline(self.settings, self.pipeline, run_id=run_id).txids

    def counted(self) -> Totals:
        """Return the state in Postgres."""
        with StateStore.connect(self.settings) as store:
            rows = store.state_rows(self.pipeline.spec.states[0])
            return {row["shop"]: (row["sold"], row["cents"]) for row in rows}

    def history(self, txid: int) -> BatchHistory:
        """Return a batch's history in the ledger."""
        with StateStore.connect(self.settings) as store:
            return store.batch_history("shops", txid)

    def waiting(self) -> list[Mapping[str, Any]]:
        """Return the records in quarantine."""
        with StateStore.connect(self.settings) as store:
            return list(store.quarantined("shops"))


@pytest.fixture
def shops(settings: Settings, register: Callable[..., None], folders: dict[str, Folder], kind: str) -> Shops:
    """The pipeline over the folder with this kind of bad record, not declared yet."""
    return Shops(settings, register, folders[kind], None)  # type: ignore[arg-type]


def transform_of_text(rows: Any) -> Any:
    """Read cents that are not a number as zero."""
    return rows.selectExpr("shop", "coalesce(try_cast(cents AS int), 0) AS cents")


# The author's new declaration when the bad record turns out to be right, and the cents that it then adds.
FIXES = {
    "does not parse": ({"schema": {"shop": "string", "cents": "string"}, "transform": transform_of_text}, 0),
    "fails the check": ({"check": {"cents are not far below": "cents >= -10"}}, -5),
}
STRICTNESS: dict[str, dict[str, Any]] = {"does not parse": {}, "fails the check": {"check": STRICT}}


@pytest.mark.parametrize("kind", ["does not parse", pytest.param("fails the check", marks=pytest.mark.soak)])
def test_quarantine_sets_one_record_aside_and_a_replay_counts_it(shops: Shops, kind: str) -> None:
    """The others count at once; once the pipeline is fixed, the replay is a batch of that one record."""
    shops.declare(on_poison="quarantine", **STRICTNESS[kind])

    assert shops.run("first") == [1, 2, 3, 4]

    assert shops.counted() == shops.folder.good_records(1, 2, 3, 4)
    assert sum(sold for sold, _ in shops.counted().values()) == RECORDS - 1
    payloads = {"does not parse": shops.folder.bad_record, "fails the check": f'{{"shop":"{BAD_SHOP}","cents":-5}}'}
    records = [(record["txid"], record["origin"], record["payload"]) for record in shops.waiting()]
    assert records == [(BAD_TXID, f"{BAD_TXID}.csv, line {BAD_LINE}", payloads[kind])]
    (attempt,) = shops.history(BAD_TXID).attempts
    assert (attempt["source_rows"], attempt["quarantined_rows"]) == (PER_FILE, 1)

    changes, cents = FIXES[kind]
    shops.declare(on_poison="quarantine", version=2, **changes)
    with StateStore.connect(shops.settings) as store:
        assert store.replay_quarantined(shops.pipeline.spec, "a person", "it was right") == (5, 1)

    assert shops.run("second") == [5]
    assert shops.waiting() == []
    assert shops.counted() == shops.folder.all_records(cents)
