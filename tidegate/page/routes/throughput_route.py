"""The route for charts over days: throughput and latency of a pipeline's commits."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from tidegate.page import access, ledger_connection
from tidegate.state_store.read_ledger import commit_throughput, pipeline_overview
from tidegate.state_store.read_ledger.commit_throughput import Bucket, Throughput

router = APIRouter(prefix="/api/pipelines/{pipeline}")

MOST_KEPT = 200  # pipelines and periods


class _Kept:
    """What was read for the last requests, by pipeline and days: the page asks every few seconds, and little is new."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[str, int], Throughput] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, pipeline: str, days: int) -> Throughput | None:
        """Return what was kept, if anything was."""
        with self._lock:
            return self._found.get((pipeline, days))

    def keep(self, pipeline: str, days: int, found: Throughput) -> None:
        """Keep something, and forget the oldest of too much."""
        with self._lock:
            self._found[pipeline, days] = found
            self._found.move_to_end((pipeline, days))
            if len(self._found) > MOST_KEPT:
                self._found.popitem(last=False)


_kept = _Kept()


class History(BaseModel):
    """Buckets in order; empty ones are left out."""

    now: datetime
    bucket_seconds: int
    buckets: Sequence[Bucket]


@router.get("/history")
def history(pipeline: access.Readable, days: Annotated[int, Query(ge=1, le=366)] = 7) -> History:
    """Return the commits of the last days, in buckets."""
    with ledger_connection.reader().snapshot(f"reading the history of {pipeline}") as connection:
        pipeline_overview.check_registered(connection, pipeline)
        found = commit_throughput.throughput(connection, pipeline, days, _kept.get(pipeline, days))
        now = pipeline_overview.moment(connection)
    _kept.keep(pipeline, days, found)
    seconds = commit_throughput.bucket_seconds(days)
    return History(now=now, bucket_seconds=seconds, buckets=found.buckets)
