"""The examples of docs/queries.md, run as they stand, against plain Python over the raw data."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.readme.pages import blocks, rows
from tests.store import LedgerReader, ask
from tidegate.jobs import Pipeline, Query
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.state_store import Settings

READINGS = [[("a", 5), ("b", 7), ("a", 6)], [("a", 6), ("b", 8), ("c", 1)], [("a", 4), ("c", 2)]]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's blocks define: its pipeline, and its queries by name."""
    names: dict[str, Any] = {}
    queries: dict[str, Query] = {}
    for block in blocks("queries.md", "python"):
        exec(compile(block, "queries.md", "exec"), names)
        queries |= {query.name: query for query in names.get("QUERIES", ())}
    return {"pipeline": names["PIPELINE"], **queries}


@pytest.mark.soak
def test_the_examples_do_what_the_page_says(settings: Settings, register: Callable[..., None], page: dict[str, Any]) -> None:
    """Each batch is compared with what the ones before have left, and queries join and aggregate what came of it."""
    pipeline: Pipeline = page["pipeline"]
    folder = settings.home / "data" / "meters"
    folder.mkdir(parents=True)
    for number, batch in enumerate(READINGS):
        lines = (json.dumps({"meter": meter, "reading": reading}) for meter, reading in batch)
        (folder / f"{number}.json").write_text("\n".join(lines))
    register(pipeline)
    run_pipeline(settings, pipeline, run_id="run")

    expected, highest = [], dict[str, int]()
    for txid, batch in enumerate(READINGS, start=1):
        before = dict(highest)
        for meter, reading in batch:
            known = before.get(meter)
            expected.append((txid, meter, reading, known, known is None or reading > known))
            highest[meter] = max(reading, highest.get(meter, reading))
    found = rows(settings, pipeline, "alert", "txid", "meter", "reading", "highest_before", "is_new")
    assert found == sorted(expected)
    new = [(meter, sum(row[1] == meter and row[4] for row in expected)) for meter in highest]
    with LedgerReader(settings) as reader:
        answer = ask(reader, page["highest"], {"least": "3"})
    assert answer.rows == sorted(((m, highest[m], n) for m, n in new if highest[m] >= 3), key=lambda row: (-row[1], row[0]))
    assert answer.txids == {"meters": 3}
