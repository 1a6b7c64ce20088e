"""`Files` with Spark: it returns what parsers read in this process, and what it refuses or loses is never sealed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from functools import reduce
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from pyspark.errors import PythonException
from pyspark.sql import functions as F

from tests import steps
from tests.sources.conftest import SCHEMA, Inbox
from tests.sources.in_process import Folder
from tests.sources.test_files import HEADER, NAMES_OF_FILES, parquet_of, people
from tests.store import Attempt
from tidegate.jobs import Files, Max, State, Sum
from tidegate.jobs.compute.sessions.session import spark_session
from tidegate.jobs.sources import ORIGIN, REFUSAL
from tidegate.jobs.sources.binding import coordinator_of, emitter_of
from tidegate.jobs.sources.files.formats import parquet
from tidegate.jobs.sources.files.formats.text_files import text_reader, text_scan
from tidegate.state_store.base.errors import MalformedRecord, RowsLost, SourceUnreadable

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


TYPES = {
    **{"name": "string", "n": "int", "big": "bigint", "price": "decimal(38,4)", "yes": "boolean", "rate": "double"},
    **{"day": "date", "at": "timestamp", "local": "timestamp_ntz", "raw": "binary"},
}
VALUES = ["é \U0001f30a\t", "-7", "9223372036854775807", "-0.0001", "true", "0.1", "9999-12-31", "0001-01-01T00:00:00Z"]
VALUES += ["2026-03-29T02:30:00.000001", "YQ=="]


def records_of(form: str) -> list[str]:
    """Return records of every type: a good one, one of NULLs, a bad one, a good one again."""
    if form == "text":
        return ["a\tb", "", "\U0001f30a", "last"]
    numbers = {"n", "big", "price", "yes", "rate"}
    if form == "csv":
        return [
            ",".join(TYPES),
            ",".join(VALUES),
            "," * (len(TYPES) - 1),
            ",".join(["x", *VALUES[1:-1], "z,z"]),
            ",".join(VALUES),
        ]
    pairs = [f'"{name}": {text if name in numbers else json.dumps(text)}' for name, text in zip(TYPES, VALUES, strict=True)]
    good = "{" + ", ".join(pairs) + ', "list": [1, null], "map": {"k": 0.5}, "struct": {"a b": "c"}}'
    return [good, '{"name": null}', good.replace("-7", '"-7"'), good]


@pytest.mark.soak
@pytest.mark.parametrize("form", ["csv", "json", "text"])
def test_spark_returns_what_is_read_in_this_process(
    inbox: Inbox, folder: Folder, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    nested = {"list": "array<int>", "map": "map<string, double>", "struct": "struct<`a b`: string>"}
    schema = {"text": {}, "csv": TYPES, "json": TYPES | nested}[form]
    source = Files("inbox", "**/*", form, schema, partitions={"dt": "date", "shop": "string"}, max_files=9)
    for number, name in enumerate(
        ("dt=2024-01-05/shop=a b", "dt=__HIVE_DEFAULT_PARTITION__/shop=10%3A30", "dt=2024-01-06/shop=[x]{y}*")
    ):
        folder.write(f"{name}/{number}.{form}", "\n".join(records_of(form) * (1 if form == "csv" else 3)) + "\n")
    metadata = folder.plan(source)
    assert metadata
    expected = folder.records(source)
    assert len(expected) == {"csv": 12, "json": 36, "text": 36}[form]
    assert sum(record[REFUSAL] is not None for record in expected) == {"csv": 3, "json": 9, "text": 0}[form]
    assert by_spark(inbox, source, metadata, flagged=True) == expected
    monkeypatch.setattr(text_reader, "HERE_BYTES", 0)
    monkeypatch.setattr(text_scan, "RANGE_BYTES", 100)
    monkeypatch.setattr(text_scan, "OPEN_BYTES", 0)
    in_tasks = by_spark(inbox, source, metadata, flagged=True)
    assert sorted(in_tasks, key=lambda row: row[ORIGIN]) == sorted(expected, key=lambda row: row[ORIGIN])


@pytest.mark.soak
def test_spark_opens_parquet_files_of_any_name(inbox: Inbox, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although Spark expands patterns; with folders' columns, and with columns that files lack."""
    monkeypatch.setattr(parquet, "HERE_BYTES", 0)
    for number, name in enumerate(NAMES_OF_FILES):
        table = people([f"é {number}", None], [number, None])
        folder.write(f"dt=2024-01-0{number % 3 + 1}/{name}", parquet_of(table if number % 4 else table.select(["name"])))
    folder.write("dt=2024-01-01/star of another file.csv", parquet_of(people(["other"], [99])))
    source = Files("inbox", "**/*", schema=SCHEMA, partitions={"dt": "date"}, max_files=100, missing="null")
    metadata = folder.plan(source)
    assert metadata
    values = lambda rows: sorted((row["name"], row["amount"]) for row in rows if row["name"])  # noqa: E731
    here = folder.records(replace(source, partitions={}))
    for kind, groups in (("int", 9), ("bigint", 9), ("int", 1)):  # a wider type, or many folders: read by our own tasks
        monkeypatch.setattr(parquet, "MOST_GROUPS", groups)
        found = by_spark(inbox, replace(source, schema={**SCHEMA, "amount": kind}), metadata, flagged=True)
        assert (values(found), len(found)) == (values(here), len(here))
        days = {row["name"]: row["dt"].day for row in found if row["name"]}
        assert days == {**{f"é {n}": n % 3 + 1 for n in range(len(NAMES_OF_FILES))}, "other": 1}
    assert {row[ORIGIN] for row in found} == {row[ORIGIN] for row in here}
    star = {"files": [file for file in metadata["files"] if file["name"].endswith("/star*.csv")], "files_before": 0}
    assert [row["name"] for row in by_spark(inbox, source, star, flagged=False)] == ["é 4", None]


@pytest.mark.soak
def test_a_damaged_page_of_parquet_is_named(inbox: Inbox) -> None:
    pipeline = inbox.declare(Files("inbox", schema=SCHEMA))
    whole = parquet_of(people([f"{n:050x}" for n in range(1000)], list(range(1000))))
    file = inbox.write("02.parquet", whole[:100] + bytes(2000) + whole[2100:])
    inbox.plan(pipeline, "run")
    assert str(file) in inbox.refused(pipeline, SourceUnreadable)


# ------------------------------------------------------------------------------------------------------- time patterns

KINDS = {"date": "dateFormat", "timestamp": "timestampFormat", "timestamp_ntz": "timestampNTZFormat"}
Case = tuple[str, str, dict[str, str], Sequence[str]]


def read_by_patterns(inbox: Inbox, *cases: Case) -> list[dict[str, Any]]:
    """Return for each case (format, type, options, texts) the value of each text, or why it is refused; Spark is asked once."""
    frames = []
    with spark_session(inbox.settings, "inbox") as spark:
        for case, (form, kind, options, texts) in enumerate(cases):
            lines = [f'{n},"{text}"' if form == "csv" else json.dumps({"n": n, "at": text}) for n, text in enumerate(texts)]
            inbox.write(f"{case}/01", "\n".join(["n,at", *lines] if form == "csv" else lines))
            source = Files(f"inbox/{case}", format=form, schema={"at": kind, "n": "int"}, options=options)  # type: ignore[arg-type]
            metadata = coordinator_of(source, inbox.settings).initialize_transaction(1, None, None)
            assert metadata is not None
            rows = emitter_of(source, spark, inbox.settings).emit_records(Attempt("inbox", 1, 1, metadata), metadata)
            values = [(F.col("at") if name == kind else F.lit(None).cast(name)).alias(name) for name in KINDS]
            frames.append(rows.select(F.lit(case).alias("case"), *values, ORIGIN, REFUSAL))
        found = reduce(lambda left, right: left.unionAll(right), frames).toArrow().to_pylist()
    results: list[dict[str, Any]] = [{} for _ in cases]
    for row in found:
        form, kind, _, texts = cases[row["case"]]
        number = int(row[ORIGIN].rpartition(" ")[2]) - (2 if form == "csv" else 1)
        results[row["case"]][texts[number]] = row[REFUSAL] or row[kind]
    assert [len(result) for result in results] == [len(texts) for *_, texts in cases]
    return results


def test_a_time_of_a_pattern_is_one_moment_in_its_zone(inbox: Inbox) -> None:
    options = {"timestampFormat": "dd.MM.yyyy HH:mm", "timeZone": "Europe/Berlin"}
    bad = ["29.03.2026 02:30", "25.10.2026 02:30", "30.10.2050 02:30", "01.01.0001 00:00"]
    good = ["29.03.2026 01:30", "29.03.2026 03:30", "25.10.2026 01:30", "25.10.2026 03:30", "01.07.2050 12:00"]
    # Both hours of a night in autumn can be written with their zone; without it, such a text is refused.
    zoned = ["2026-10-25 02:30+02:00", "2026-10-25 02:30+01:00", "2026-10-25 02:30Z", "2026-07-01 12:00", "2026-10-25 02:30"]
    by_zone = [{**options, "timestampFormat": f"yyyy-MM-dd HH:mm{zone}"} for zone in ("XXX", "[XXX]")]
    *local, always, maybe = read_by_patterns(
        inbox,
        *((form, "timestamp", options, bad + good) for form in ("csv", "json")),
        *(("csv", "timestamp", of, zoned) for of in by_zone),
    )
    zone = ZoneInfo("Europe/Berlin")
    moments = {text: datetime.strptime(text, "%d.%m.%Y %H:%M").replace(tzinfo=zone) for text in good}
    for found in local:
        for text in bad:
            assert found[text].startswith(f"column at: '{text}' is no one moment of the years 1 to 9999 in Europe/Berlin")
        assert {text: found[text] for text in good} == moments
    for found in (always, maybe):
        assert {text: found[text] for text in zoned[:3]} == {text: datetime.fromisoformat(text) for text in zoned[:3]}
    assert maybe[zoned[3]] == datetime(2026, 7, 1, 10, tzinfo=UTC)
    assert "is no one moment" in maybe[zoned[4]]
    assert all("is no timestamp of the form" in always[text] for text in zoned[3:])


def test_a_text_of_a_pattern_is_read_to_its_end(inbox: Inbox) -> None:
    bad = ["05.01.2024\x01", "05.01.2024\x01junk", "\x0105.01.2024", "\x01", "05.01.2024 ", "05.01.0000", "", "31.02.2024"]
    bad += ["05.01.12024", "5.1.2024", "05.01.2024\\", "\u0660\u0665.01.2024", "05.01.2024\njunk"]
    good = {"05.01.2024": (2024, 1, 5), "31.12.9999": (9999, 12, 31), "01.01.0001": (1, 1, 1)}
    cases = [(form, kind, {KINDS[kind]: "dd.MM.yyyy"}, [*good, *bad]) for form in ("csv", "json") for kind in KINDS]
    made: dict[str, Callable[..., Any]] = {
        "date": date,
        "timestamp": lambda *day: datetime(*day, tzinfo=UTC),
        "timestamp_ntz": datetime,
    }
    for (_, kind, *_), found in zip(cases, read_by_patterns(inbox, *cases), strict=True):
        assert [found.pop(text) for text in good] == [made[kind](*day) for day in good.values()]
        assert found == {text: f"column at: '{text}' is no {kind} of the form dd.MM.yyyy" for text in bad}


def test_patterns_are_read_as_by_python(inbox: Inbox) -> None:
    expected = {
        ("yyyy-MM-dd hh:mm a", "2024-01-05 12:30 AM"): datetime(2024, 1, 5, 0, 30, tzinfo=UTC),
        ("yyyy-DDD HH:mm:ss.SSSSSS", "2024-060 23:59:59.000001"): datetime(2024, 2, 29, 23, 59, 59, 1, tzinfo=UTC),
        ("dd/MMM/yyyy:HH:mm:ss Z", "05/Jan/2024:10:00:00 +0200"): datetime(2024, 1, 5, 8, tzinfo=UTC),
        ("yyyy-MM-dd'T'HH:mm[:ss]", "2024-01-05T10:00"): datetime(2024, 1, 5, 10, tzinfo=UTC),
    }
    cases = [("csv", "timestamp", {"timestampFormat": pattern}, [text]) for pattern, text in expected]
    assert read_by_patterns(inbox, *cases) == [{text: time} for (_, text), time in expected.items()]


# ------------------------------------------------------------------------------------------------------- whole batches


def test_a_column_whose_name_has_a_dot_is_summed(inbox: Inbox) -> None:
    schema = {"name": "string", "a.b": "int", "c`d": "int"}
    states = {"per_name": State(key={"name": "text"}, aggregates={"one": Sum("a.b"), "two": Max("c`d")})}
    pipeline = inbox.declare(replace(CSV, schema=schema), states=states)
    inbox.write("01.csv", "name,a.b,c`d\na,1,2\na,3,4\n")
    inbox.run(pipeline)
    assert inbox.rows(pipeline) == [{"name": "a", "one": 4, "two": 4}]


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
