"""Routes for states: browse rows in pages, look up keys, download all rows."""

import base64
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import anyio
from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel, FailFast, Field
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tidegate.page import access, ledger_connection
from tidegate.page.http_answers import Answer, Refusal, body_of
from tidegate.page.shared_models import Column, as_json, columns_of
from tidegate.state_store.base.errors import StoreUnavailable, UsageError
from tidegate.state_store.declarations.pipeline_spec import StateSpec
from tidegate.state_store.ledger import cursors
from tidegate.state_store.read_ledger import registered_pipelines
from tidegate.state_store.read_states import state_rows

router = APIRouter(prefix="/api/pipelines/{pipeline}/states")

MOST_DOWNLOADS = 2  # at once, in each process of the api-server: each holds a connection and a snapshot
DOWNLOAD_STATEMENT_SECONDS = 300
SECONDS_PER_PART = 60  # in which the reader of a download has to take a part: its snapshot holds up vacuum and migrations
MOST_KEYS_OF_A_REQUEST = 1000
_NEEDS_QUOTES = frozenset('",\r\n')
_downloads = threading.BoundedSemaphore(MOST_DOWNLOADS)


class Rows(BaseModel):
    """Rows of a state; bigints, decimals, dates and bytes as text, as no JavaScript number holds them."""

    txid: int
    columns: list[Column]
    rows: list[list[Any]]
    next: str | None


class Keys(BaseModel):
    """The keys of rows that are requested, each as its values in text, null for NULL."""

    keys: Annotated[list[Annotated[list[str | None], FailFast()]], Field(max_length=MOST_KEYS_OF_A_REQUEST), FailFast()]


class FoundRows(BaseModel):
    """For each requested key its row, or null; the values are those of `Rows`."""

    txid: int
    columns: list[Column]
    rows: list[list[Any] | None]


@router.get("/{state}/rows", response_model=Rows)
def rows(
    pipeline: access.Readable,
    state: str,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    after: Annotated[str | None, Query(max_length=20_000)] = None,
    key: Annotated[list[Annotated[str, Query(max_length=10_000)]] | None, Query(max_length=50)] = None,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Any:
    """Return the row of a key, one value per column, or some rows in the order of the keys, and the txid they belong to.

    The ETag changes with every commit, rebuild and prune; until then, a request with `If-None-Match` gets an empty answer, 304.
    """
    with ledger_connection.reader().snapshot(f"reading state {state}", states=[state]) as connection:
        spec = _state(connection, pipeline, state)
        version = state_rows.version_of(connection, pipeline)
        headers = {"ETag": f'"{version}"', "Cache-Control": "private, no-cache"}
        if if_none_match == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        more_follow = False
        if key is not None:
            shown: list[Sequence[Any]] = [
                list(row.values()) for row in state_rows.rows_of(connection, spec, [key]) if row is not None
            ]
        else:
            begin = None if after is None else _key_in(after)
            shown, more_follow = state_rows.rows_after(connection, spec, begin, limit)
    answer = Rows(
        txid=version.txid,
        columns=columns_of(spec.shown),
        rows=[_as_json(spec, row) for row in shown],
        next=_token(spec, shown[-1]) if more_follow else None,
    )
    return Answer(answer.model_dump(), headers=headers)  # FastAPI would add the headers to those of an answer of its own


@router.post("/{state}/rows")
def rows_of_keys(pipeline: access.Readable, state: str, requested: Annotated[Keys, body_of(Keys)]) -> FoundRows:
    """Return the rows of many keys from one snapshot, in the order of the keys, and the txid they belong to.

    They have as many characters as a page of rows, at most.
    """
    with ledger_connection.reader().snapshot(f"reading state {state}", states=[state]) as connection:
        spec = _state(connection, pipeline, state)
        txid = cursors.committed(connection, pipeline)
        found = state_rows.rows_of(connection, spec, requested.keys, most_characters=state_rows.PAGE_CHARACTERS)
    return FoundRows(
        txid=txid,
        columns=columns_of(spec.shown),
        rows=[None if row is None else _as_json(spec, list(row.values())) for row in found],
    )


@router.get("/{state}.csv")
def download(pipeline: access.Readable, state: str) -> StreamingResponse:
    """Return all rows from one snapshot as CSV; NULL is an empty field, an empty text is two quotes."""
    if not _downloads.acquire(blocking=False):
        raise StoreUnavailable(f"{MOST_DOWNLOADS} downloads are under way. Try again when one has ended.")
    opened = ExitStack()
    opened.callback(_downloads.release)
    try:
        snapshot = ledger_connection.reader().snapshot(
            f"reading state {state}", states=[state], timeout_seconds=DOWNLOAD_STATEMENT_SECONDS
        )
        connection = opened.enter_context(snapshot)
        spec = _state(connection, pipeline, state)
        rows = state_rows.all_rows(connection, spec)
        first = next(rows, None)  # what fails at once is an answer of its own
    except BaseException:
        opened.close()
        raise
    return Download(f"{pipeline}.{state}.csv", _parts(spec, first, rows), opened)


class Download(StreamingResponse):
    """A file that is sent in parts. What was opened for it is closed at its end, also if its reader goes away, or stands still.

    A reader that stands still gets no end of the file, by which it notices that parts are missing.
    """

    def __init__(self, name: str, parts: Iterator[str], opened: ExitStack) -> None:
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        super().__init__(parts, media_type="text/csv; charset=utf-8", headers=headers)
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file."""

        async def send_in_time(message: Message) -> None:
            with anyio.fail_after(SECONDS_PER_PART):  # a TimeoutError is an OSError, as of a reader that has gone away
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        finally:
            with anyio.CancelScope(shield=True):
                await run_in_threadpool(self._opened.close)


def _parts(spec: StateSpec, first: Sequence[str | None] | None, rows: Iterator[Sequence[str | None]]) -> Iterator[str]:
    part = [_line([column.name for column in spec.shown])]
    if first is not None:
        part.append(_line(first))
    for row in rows:
        part.append(_line(row))
        if len(part) >= state_rows.ROWS_AT_ONCE:
            yield "".join(part)
            part = []
    yield "".join(part)


def _line(row: Sequence[str | None]) -> str:
    return ",".join("" if value is None else _field(value) for value in row) + "\r\n"


def _field(value: str) -> str:
    if value and _NEEDS_QUOTES.isdisjoint(value):
        return value
    return '"' + value.replace('"', '""') + '"'


def _state(connection: Connection, pipeline: str, name: str) -> StateSpec:
    spec = registered_pipelines.spec_of_pipeline(connection, pipeline).state(name)
    if spec is None or not spec.is_table:
        raise Refusal(404, "UNKNOWN_STATE", f"{pipeline} has no state {name}.")
    return spec


def _as_json(spec: StateSpec, row: Sequence[Any]) -> list[Any]:
    values = [as_json(value, column.type.name) for value, column in zip(row, spec.shown, strict=True)]
    return [f"[{', '.join(map(str, value))}]" if isinstance(value, list) else value for value in values]


def _token(spec: StateSpec, row: Sequence[Any]) -> str:
    """Return the key of a row as an opaque text, from which the next page begins."""
    key = [None if value is None else str(value) for value in _as_json(spec, row)[: len(spec.row_key)]]
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode()


def _key_in(token: str) -> list[str | None]:
    try:
        key = json.loads(base64.urlsafe_b64decode(token))
    except (ValueError, RecursionError) as error:
        raise UsageError("`after` is not what an earlier answer called `next`.") from error
    if not isinstance(key, list) or not all(value is None or (isinstance(value, str) and "\0" not in value) for value in key):
        raise UsageError("`after` is not what an earlier answer called `next`.")
    return key
