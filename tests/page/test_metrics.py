"""GET /tidegate/metrics of a real api-server: who may read, what is exposed, and what it says when something is away."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from prometheus_client.parser import text_string_to_metric_families as parse

from tests.batches import Batches
from tests.page.conftest import METRICS_TOKEN, Server, Visit
from tests.page.pipelines import CLICKS
from tests.store import Tracked, tables
from tidegate import migrations
from tidegate.state_store import StateStore

ODD = 'a "quoted" \\ name\nof two lines'
Scrape = Callable[..., httpx.Response]


def samples(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    return [sample for family in parse(answer.text) for sample in family.samples]


def value(answer: httpx.Response, name: str, **labels: str) -> float | None:
    return next((each.value for each in samples(answer) if (each.name, each.labels) == (name, labels)), None)


def pipelines(answer: httpx.Response) -> set[str]:
    return {sample.labels["pipeline"] for sample in samples(answer) if "pipeline" in sample.labels}


@pytest.fixture(scope="module")
def scrape(visit: Visit) -> Scrape:
    """A function that scrapes as Prometheus does: with the token of the stack, or with another, or with none."""

    def request(token: str | None = METRICS_TOKEN) -> httpx.Response:
        return visit().http.get("/tidegate/metrics", headers={} if token is None else {"Authorization": f"Bearer {token}"})

    return request


@pytest.fixture(scope="module")
def busy(server: Server) -> None:
    """Pipeline clicks: committed, skipped, failed and halted batches; orphan, whose plans fail; and one of an odd name."""
    with StateStore.connect(server.settings) as store:
        clicks = Batches(store, CLICKS)
        for txid in clicks.plan("run", 7)[:2]:
            store.seal(clicks.begin(txid), [], Tracked(10 * txid, staged_bytes=7))
            clicks.commit(txid)
        clicks.begin(3)
        store.halt_batch(CLICKS.name, 3, "MALFORMED_RECORD: a.csv, line 3: x")
        store.skip_batch(CLICKS.spec, 3, "me", "it cannot be mended")
        clicks.begin(4)
        store.fail_attempt(clicks.begin(4), "SPARK_FAILED: it broke")
        clicks.fail(5)
        store.fail_attempt(clicks.begin(6), "SomeLibrarysError: boo")
        for _ in range(3):
            store.fail_plan("orphan", store.begin_plan("orphan", "run"), "run", "SOURCE_UNREADABLE: The folder is gone.")
    with migrations.connected(server.settings) as connection:
        odd = {"pipeline": ODD, "source_kind": "opaque", "fingerprint": "x", "declaration": {}}
        connection.execute(sa.insert(tables.pipeline).values(odd))
        late = {"number": 1, "reason": "late", "payload": "{}", "is_raw": False, "state": "clicks_per_hour"}
        connection.execute(sa.insert(tables.quarantine).values(pipeline=CLICKS.name, txid=2, **late))
        connection.execute(sa.insert(tables.cursor).values(pipeline=ODD, txid=0, epoch="elsewhere"))


@pytest.mark.promise("security:reader-of-metrics-endpoint")
def test_the_token_opens_all_pipelines_and_a_user_sees_his_own(busy: None, scrape: Scrape, visit: Visit) -> None:
    assert pipelines(scrape()) == {"broken", "clicks", "orphan", ODD}
    assert pipelines(visit("clerk").get("/metrics")) == {"clicks", "orphan"}
    assert pipelines(visit("nobody").get("/metrics")) == set()
    for refused in (scrape(None), scrape("x"), scrape("x" * 43), visit().get("/metrics")):
        assert refused.status_code == 401
        assert "tidegate_" not in refused.text


@pytest.mark.promise("security:reader-of-metrics-endpoint")
def test_a_token_that_others_could_read_opens_nothing(server: Server, scrape: Scrape) -> None:
    file, token = server.settings.metrics_token_file, METRICS_TOKEN
    try:
        file.chmod(0o644)
        assert scrape(token).status_code == 401
        assert "chmod 600" in server.log.getvalue()
        file.chmod(0o600)
        assert scrape(token).status_code == 200
        for content in ("", "\n", "short"):
            file.write_text(content)
            assert {scrape(given).status_code for given in ("short", "x", token)} == {401}
        file.rename(file.with_suffix(".away"))
        assert scrape(token).status_code == 401
        file.with_suffix(".away").rename(file)
    finally:
        file.write_text(token)
        file.chmod(0o600)
    assert token not in server.log.getvalue()


def test_the_metrics_are_those_of_the_ledger(busy: None, scrape: Scrape) -> None:
    found = scrape()
    of_clicks = {"committed_txid": 3, "lag_txids": 4, "tries": 2, "quarantine_records": 0, "staged_bytes": 14, "hole": 0}
    assert {name: value(found, f"tidegate_{name}", pipeline="clicks") for name in of_clicks} == of_clicks
    assert value(found, "tidegate_up") == 1
    assert value(found, "tidegate_batches", pipeline="clicks", phase="planned") == 1
    assert value(found, "tidegate_hole", pipeline=ODD) == 1
    for name in ("tidegate_last_skip_timestamp_seconds", "tidegate_last_set_aside_timestamp_seconds"):
        assert value(found, name, pipeline="clicks") > 1_700_000_000
        assert value(found, name, pipeline="orphan") is None
    for phase, code, fault in (("failed", "SPARK_FAILED", "computation"), ("failed", "OTHER", "unknown")):
        assert value(found, "tidegate_batch_errors", pipeline="clicks", phase=phase, code=code, fault=fault) == 1
    assert value(found, "tidegate_failed_plans", pipeline="orphan", code="SOURCE_UNREADABLE", fault="source") == 3
    assert "boo" not in found.text
