"""The metrics of the ledger as Prometheus reads them: GET /tidegate/metrics.

The scrape token (setting `metrics_token_file`) opens all pipelines; a user of Airflow sees those whose Dags he may read. If
Postgres is away, the answer is `tidegate_up 0` and not an error: a scrape that fails means that the api-server is away, which
is another alert with another remedy.
"""

import hmac
import logging
import stat
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tidegate.output import to_paste
from tidegate.page import access, ledger_connection
from tidegate.page.routes.metric_definitions import families
from tidegate.state_store.base.errors import SettingsInvalid, TidegateError
from tidegate.state_store.read_ledger.metric_values import Measures, measures

logger = logging.getLogger(__name__)

SHORTEST_TOKEN = 16
router = APIRouter()


class _Families(Collector):
    """The metrics of one scrape, for Prometheus' encoders."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        yield from self._found


async def user_unless_scraper(
    request: Request, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
) -> AsyncIterator[Any]:
    """Yield Airflow's user, in turn; None for who sends the scrape token.

    Raises: Refusal (401).
    """
    if bearer is not None:
        is_scraper: bool = await run_in_threadpool(is_scrape_token, bearer.credentials)
        if is_scraper:
            yield None
            return
    async with access.in_turn(await access.current_user(request, bearer)) as user:
        yield user


@router.get("/metrics")
def scrape(request: Request, user: Annotated[Any, Depends(user_unless_scraper, scope="function")]) -> Response:
    """Return the metrics in Prometheus' text format, or in that of OpenMetrics if it is asked for."""
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    found, seconds = _measure()
    if found is not None and user is not None:
        may_read = access.allowed(user, access.READ, [each.pipeline for each in found.pipelines])
        found = replace(found, pipelines=[each for each in found.pipelines if each.pipeline in may_read])
    return Response(encode(_Families(list(families(found, seconds)))), media_type=content_type)


def _measure() -> tuple[Measures | None, float]:
    """Return the measures, None if the ledger cannot be read, and the seconds that this took."""
    began = time.monotonic()
    found: Measures | None = None
    try:
        reader = ledger_connection.reader()
        with reader.snapshot("measuring") as connection:
            found = measures(connection, reader.witness)
    except TidegateError as error:
        logger.warning("The ledger cannot be measured: %s: %s", error.code, error)
    return found, time.monotonic() - began


def is_scrape_token(given: str) -> bool:
    """Return whether this is the scrape token; never, if none is set, or if its file is not fit to hold a secret."""
    file = ledger_connection.settings().metrics_token_file
    if file is None:
        return False
    try:
        token = read_token(file)
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
        raise SettingsInvalid(
            f"metrics_token_file {file} can be read or changed by other accounts. Run: chmod 600 {to_paste(file)}"
        )
    if len(token) < SHORTEST_TOKEN:
        raise SettingsInvalid(
            f"metrics_token_file {file} holds {len(token)} characters; a token has at least {SHORTEST_TOKEN}."
        )
    return token
