"""The metrics of the ledger as Prometheus reads them: GET /tidegate/metrics.

The scrape token (setting `metrics_token_file`) opens all pipelines; a user of Airflow sees those whose Dags he may read. If
Postgres is away, the answer is `tidegate_up 0` and not an error: a scrape that fails means that the api-server is away, which
is another alert with another remedy.

Each process of the api-server sums up the ledger for itself (`state_store.totals`), and all of them return the same sums.
"""

import hmac
import logging
import stat
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.core_api.security import get_user
from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from state_store import Settings, StateStore
from state_store.errors import SettingsInvalid, TidegateError
from state_store.measures import Measures
from state_store.totals import Settled
from tidegate.page.metric_families import families

logger = logging.getLogger(__name__)

SHORTEST_TOKEN = 16
router = APIRouter()


class Scraper:
    """Reads the ledger for scrapes, one at a time, and keeps the sums of what is settled between them."""

    def __init__(self) -> None:
        self._settled = Settled()
        self._lock = threading.Lock()

    def scrape(self, settings: Settings, readable: Collection[str] | None) -> list[Metric]:
        """Return the metrics of these pipelines, or of all; only `tidegate_up 0` if the ledger cannot be read."""
        with self._lock:
            began = time.monotonic()
            found: Measures | None = None
            try:
                with StateStore.connect(settings, user=settings.pg_reader) as store:
                    found = store.measures(self._settled)
            except TidegateError as error:
                logger.warning("The ledger cannot be measured: %s: %s", error.code, error)
            took = time.monotonic() - began
        if found is not None and readable is not None:
            found = Measures([each for each in found.pipelines if each.pipeline in readable], found.staging_tables)
        return list(families(found, took))


class _Families(Collector):
    """The metrics of one scrape, for Prometheus' encoders."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        yield from self._found


_scraper = Scraper()


async def readable_pipelines(request: Request) -> Collection[str] | None:
    """Return the names of the Dags that the user may read; None, which is all, with the scrape token.

    Raises: 401 without a login, 403 with another token.
    """
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    is_bearer = scheme.lower() == "bearer" and bool(given)
    if is_bearer and await run_in_threadpool(is_scrape_token, given, Settings.load()):
        return None
    bearer = HTTPAuthorizationCredentials(scheme=scheme, credentials=given) if is_bearer else None
    user = await get_user(request, None, bearer)
    return await run_in_threadpool(lambda: get_auth_manager().get_authorized_dag_ids(user=user))


@router.get("/metrics", include_in_schema=False)
def metrics(request: Request, readable: Annotated[Collection[str] | None, Depends(readable_pipelines)]) -> Response:
    """Return the metrics in Prometheus' text format, or in that of OpenMetrics if it is asked for."""
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    found = _scraper.scrape(Settings.load(), readable)
    return Response(encode(_Families(found)), media_type=content_type, headers={"Cache-Control": "no-store"})


def is_scrape_token(given: str, settings: Settings) -> bool:
    """Return whether this is the scrape token; never, if none is set, or if its file is not fit to hold a secret."""
    if settings.metrics_token_file is None:
        return False
    try:
        token = read_token(settings.metrics_token_file)
    except SettingsInvalid as error:
        logger.warning("No scrape token is accepted: %s", error)
        return False
    return hmac.compare_digest(given.encode(), token.encode())


def read_token(file: Path) -> str:
    """Return the scrape token in a file.

    Raises: SettingsInvalid if it cannot be read, is short, or could be read or written by every account.
    """
    try:
        mode, token = file.stat().st_mode, file.read_text().strip()
    except (OSError, ValueError) as error:
        raise SettingsInvalid(f"metrics_token_file {file} cannot be read: {error}. Fix it or name another.") from error
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise SettingsInvalid(f"metrics_token_file {file} can be read or changed by other accounts. Run: chmod 600 {file}")
    if len(token) < SHORTEST_TOKEN:
        raise SettingsInvalid(
            f"metrics_token_file {file} holds {len(token)} characters; a token has at least {SHORTEST_TOKEN}."
        )
    return token
