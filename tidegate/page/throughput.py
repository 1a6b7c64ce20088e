"""The route for charts over days: throughput and latency of a pipeline's commits."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from state_store import overview, throughput
from tidegate.page import access, ledger

router = APIRouter(prefix="/api/pipelines/{pipeline}")


class Bucket(BaseModel):
    """The commits of a bucket, as `state_store.throughput.Bucket` defines it."""

    at: datetime
    batches: int
    rows: int
    skipped: int
    quarantined: int
    processing_p50: float | None
    processing_p95: float | None
    commit_latency_p50: float | None
    commit_latency_p95: float | None


class History(BaseModel):
    """Buckets in order; empty ones are left out."""

    now: datetime
    bucket_seconds: int
    buckets: list[Bucket]


@router.get("/history")
def history(pipeline: access.Readable, days: Annotated[int, Query(ge=1, le=366)] = 7) -> History:
    """Return the commits of the last days, in buckets."""
    with ledger.reader().snapshot(f"reading the history of {pipeline}") as connection:
        overview.check_registered(connection, pipeline)
        buckets = throughput.throughput(connection, pipeline, days)
        now = overview.moment(connection)
    seconds = throughput.bucket_seconds(days)
    return History(now=now, bucket_seconds=seconds, buckets=[Bucket(**vars(bucket)) for bucket in buckets])
