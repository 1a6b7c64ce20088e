"""`Files` with Spark: it returns what parsers read in this process, and what it refuses or loses is never sealed."""

import json
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PythonException

from tests import steps
from tests.sources.conftest import SCHEMA, Inbox
from tests.sources.in_process import Folder
from tests.sources.test_files import HEADER, parquet_of, people
from tests.store import Attempt
from tidegate.jobs import Files
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.sources import ORIGIN, REFUSAL
from tidegate.jobs.sources.binding import coordinator_of, emitter_of
from tidegate.jobs.sources.files.formats.text_files import text_reader, text_scan
from tidegate.state_store.base.errors import MalformedRecord, RowsLost

CSV = Files("inbox", glob="*.csv*", format="csv", schema=SCHEMA, max_files=10)


@pytest.fixture
def folder(inbox: Inbox) -> Folder:
    inbox.folder.rmdir()
    return Folder(inbox.settings.home)


def by_spark(inbox: Inbox, source: Files, metadata: dict[str, Any], *, flagged: bool) -> list[dict[str, Any]]:
    attempt = Attempt("inbox", 1, 1, metadata)
    with spark_session(inbox.settings, "inbox") as spark:
        emitter = emitter_of(source, spark, inbox.settings)
        rows = (emitter.emit_records if flagged else emitter.emit_batch)(attempt, metadata).toArrow().to_pylist()
    emitter.verify_batch(attempt, metadata)
    assert emitter.expected_rows(metadata) == len(rows)
    return list(rows)


NUMBERS = {"n": "int", "big": "bigint", "price": "decimal(38,4)", "yes": "boolean", "rate": "double", "list": "array<int>"}
OTHERS = {"name": "string", "day": "date", "at": "timestamp", "local": "timestamp_ntz", "raw": "binary"}
NESTED = {"map": "map<string, double>", "struct": "struct<`a b`: string>"}
VALUES = ["-7", "9223372036854775807", "-0.0001", "true", "0.1", "[1, null]", '"é \U0001f30a\\t"', '"9999-12-31"']
VALUES += ['"0001-01-01T00:00:00Z"', '"2026-03-29T02:30:00.000001"', '"YQ=="', '{"k": 0.5}', '{"a b": "c"}']


@pytest.mark.soak
@pytest.mark.promise("decision:0018")
def test_spark_returns_what_is_read_in_this_process(inbox: Inbox, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = NUMBERS | OTHERS | NESTED
    good = "{" + ", ".join(f'"{name}": {value}' for name, value in zip(schema, VALUES, strict=True)) + "}"
    source = Files("inbox", "**/*", "json", schema, partitions={"dt": "date", "shop": "string"}, max_files=9)
    for name in ("dt=2024-01-05/shop=a b", "dt=__HIVE_DEFAULT_PARTITION__/shop=10%3A30", "dt=2024-01-06/shop=[x]{y}*"):
        folder.write(f"{name}/1.json", "\n".join([good, '{"name": null}', good.replace("-7", '"-7"'), good] * 3))
    metadata = folder.plan(source)
    assert metadata
    expected = folder.records(source)
    assert sum(record[REFUSAL] is not None for record in expected) == 9
    assert by_spark(inbox, source, metadata, flagged=True) == expected
    monkeypatch.setattr(text_reader, "HERE_BYTES", 0)
    monkeypatch.setattr(text_scan, "RANGE_BYTES", 100)
    monkeypatch.setattr(text_scan, "OPEN_BYTES", 0)
    in_tasks = by_spark(inbox, source, metadata, flagged=True)
    assert sorted(in_tasks, key=lambda row: row[ORIGIN]) == sorted(expected, key=lambda row: row[ORIGIN])


def test_spark_opens_parquet_files_of_any_name_and_no_others(inbox: Inbox, folder: Folder) -> None:
    """Although Spark expands patterns, and Hadoop takes a colon for the end of a scheme."""
    names = ["at 10:30.csv", "back\\slash.csv", "hash#100%25.csv", "star of another.csv", "star*.csv", "{braces} [x]?.csv"]
    for number, name in enumerate(names):
        folder.write(name, parquet_of(people([name], [number])))
    source = Files("inbox", schema=SCHEMA, max_files=9)
    metadata: Any = folder.plan(source)
    for some in (metadata["files"], [file for file in metadata["files"] if file["name"] == "star*.csv"]):
        rows = by_spark(inbox, source, {**metadata, "files": some}, flagged=False)
        assert sorted(row["name"] for row in rows) == [file["name"] for file in some]


# ------------------------------------------------------------------------------------------------------- time patterns

BERLIN = {"timeZone": "Europe/Berlin"}
MISFIT, NO_MOMENT = "is no {} of the form {}", "is no one moment of the years 1 to 9999 in Europe/Berlin"
NO_DAYS = ["05.01.2024\x01", "05.01.2024\x01junk", "\x01", "05.01.2024 ", "05.01.0000", "31.02.2024", "5.1.2024"]
# By type, pattern and options: what each text is read as, or why it is refused.
PATTERNS: list[tuple[str, str, dict[str, str], dict[str, Any]]] = [
    ("date", "dd.MM.yyyy", {}, {"05.01.2024": date(2024, 1, 5), "31.12.9999": date.max, **dict.fromkeys(NO_DAYS, MISFIT)}),
    (
        *("timestamp", "dd.MM.yyyy HH:mm", BERLIN),
        {
            "29.03.2026 03:30": datetime(2026, 3, 29, 1, 30, tzinfo=UTC),
            "01.07.2050 12:00": datetime(2050, 7, 1, 10, tzinfo=UTC),
            **dict.fromkeys(["29.03.2026 02:30", "25.10.2026 02:30", "30.10.2050 02:30", "01.01.0001 00:00"], NO_MOMENT),
        },
    ),
    (
        *("timestamp", "yyyy-MM-dd HH:mm[XXX]", BERLIN),
        {
            "2026-10-25 02:30+02:00": datetime(2026, 10, 25, 0, 30, tzinfo=UTC),
            "2026-10-25 02:30+01:00": datetime(2026, 10, 25, 1, 30, tzinfo=UTC),
            "2026-07-01 12:00": datetime(2026, 7, 1, 10, tzinfo=UTC),
            "2026-10-25 02:30": NO_MOMENT,
        },
    ),
    ("timestamp_ntz", "yyyy-DDD hh:mm a", {}, {"2024-060 12:30 AM": datetime(2024, 2, 29, 0, 30)}),
]
OPTIONS = {"date": "dateFormat", "timestamp": "timestampFormat", "timestamp_ntz": "timestampNTZFormat"}


def test_a_text_is_read_to_its_end_by_a_pattern_as_one_moment(inbox: Inbox) -> None:
    with spark_session(inbox.settings, "inbox") as spark:
        for number, (kind, pattern, options, texts) in enumerate(PATTERNS):
            inbox.write(f"{number}/01", "\n".join(json.dumps({"at": text}) for text in texts))
            source = Files(f"inbox/{number}", format="json", schema={"at": kind}, options={OPTIONS[kind]: pattern, **options})
            metadata = coordinator_of(source, inbox.settings).initialize_transaction(1, None, None)
            assert metadata is not None
            rows = emitter_of(source, spark, inbox.settings).emit_records(Attempt("inbox", 1, 1, metadata), metadata)
            found = sorted(rows.toArrow().to_pylist(), key=lambda row: int(row[ORIGIN].rpartition(" ")[2]))
            for row, (text, value) in zip(found, texts.items(), strict=True):
                if isinstance(value, str):
                    assert row[REFUSAL].startswith(f"column at: '{text}' {value.format(kind, pattern)}")
                else:
                    assert (row["at"], row[REFUSAL]) == (value, None)


# ------------------------------------------------------------------------------------------------------- whole batches


@pytest.mark.promise("decision:0018")
def test_records_that_spark_does_not_see_are_missed(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_reader, "HERE_BYTES", 0)
    monkeypatch.setattr(text_scan, "RANGE_BYTES", 1)
    for number in range(3):
        inbox.write(f"0{number}.csv", HEADER + "a,1\n" * 100)
    pipeline = inbox.declare(CSV)
    inbox.plan(pipeline, "run")
    real = text_scan.in_tasks
    monkeypatch.setattr(text_reader, "in_tasks", lambda ranges: real(ranges)[1:])
    with pytest.raises(RowsLost, match="of 300 rows 200 arrived in the partials of state per_name"):
        steps.process(inbox.settings, pipeline, 1, owner="test")
    monkeypatch.setattr(text_reader, "in_tasks", real)
    assert inbox.run(pipeline, "again") == [1]
    assert inbox.rows(pipeline) == [{"name": "a", "lines": 300, "amount": 300}]


@pytest.mark.soak
@pytest.mark.promise("limit:MAX_RECORD_BYTES", "limit:LONG_ROW_BYTES")
def test_long_parquet_rows_are_read_in_pieces_and_too_long_ones_refused_while_sparks_server_goes_on(inbox: Inbox) -> None:

    def planned(source: Files) -> Any:
        return coordinator_of(source, inbox.settings).initialize_transaction(1, None, None)

    wide = {f"c{number}": "string" for number in range(10)}
    wide_source = Files("inbox", schema=wide)
    short, long = dict.fromkeys(wide, ""), dict.fromkeys(wide, "x" * (60 << 20))
    for rows, place in ([long], "row group 1: the row has"), ([*[short] * 500, long], "row 501: the row has 629145600 bytes"):
        file = inbox.write("1.parquet", parquet_of(pa.Table.from_pylist(rows)))
        with pytest.raises((MalformedRecord, PythonException), match=f"{file}, {place}"):
            by_spark(inbox, wide_source, planned(wide_source), flagged=False)
    source = Files("inbox", schema={"name": "string"})
    for texts in ([f"{number:06d}" * 100_000 for number in range(4096)], ["y" * 600_000] * 4096):
        inbox.write("1.parquet", parquet_of(pa.table({"name": texts})))
        metadata = planned(source)
        with spark_session(inbox.settings, "inbox") as spark:
            rows = emitter_of(source, spark, inbox.settings).emit_batch(Attempt("inbox", 1, 1, metadata), metadata)
            assert rows.selectExpr("count(*)", "sum(length(name))").collect() == [(4096, 4096 * 600_000)]
