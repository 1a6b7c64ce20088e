"""The metrics of the ledger by name, and how they follow from its measures.

`METRICS` lists them all: the page's endpoint, the documentation, the dashboard and the alert rules are compared with it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from tidegate.state_store.base.errors import code_and_fault
from tidegate.state_store.read_ledger.metric_values import Measures, PipelineMeasures
from tidegate.state_store.seal.attempts import FENCED
from tidegate.state_store.totals import BOUNDS_SECONDS, MICROSECONDS, PHASES, SEALED, Histogram

LATENCY = "latency"


@dataclass(frozen=True)
class Described:
    """A metric as people see it: counters without their `_total`, histograms without `_bucket`, `_count` and `_sum`."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


_OF_PIPELINE = ("pipeline",)
METRICS = {
    described.name: described
    for described in (
        Described(
            "tidegate_up", "gauge", "1 if the ledger could be read. If 0, all other metrics but the next two are missing."
        ),
        Described("tidegate_scrape_duration_seconds", "gauge", "How long reading the ledger took for this scrape."),
        Described("tidegate_build", "gauge", "Always 1; the label is Tidegate's version.", ("version",)),
        Described("tidegate_committed_txid", "gauge", "Last txid that has committed; 0 before the first.", _OF_PIPELINE),
        Described("tidegate_opened_txid", "gauge", "Last txid that was planned.", _OF_PIPELINE),
        Described("tidegate_lag_txids", "gauge", "Batches that were planned and have not committed.", _OF_PIPELINE),
        Described("tidegate_lag_seconds", "gauge", "Age of the oldest batch that has not committed; 0 if none.", _OF_PIPELINE),
        Described(
            "tidegate_last_commit_timestamp_seconds",
            "gauge",
            "When the last txid committed; none before the first.",
            _OF_PIPELINE,
        ),
        Described(
            "tidegate_batches",
            "gauge",
            "Batches that were planned and have not committed, by phase.",
            (*_OF_PIPELINE, "phase"),
        ),
        Described(
            "tidegate_batch_errors",
            "gauge",
            "Of these, those that failed or are halted, by the error's code and where its cause lies.",
            (*_OF_PIPELINE, "phase", "code", "fault"),
        ),
        Described(
            "tidegate_failed_plans",
            "gauge",
            "Plans that have failed since one succeeded, by the newest error's code and where its cause lies; none if none.",
            (*_OF_PIPELINE, "code", "fault"),
        ),
        Described(
            "tidegate_last_plan_timestamp_seconds",
            "gauge",
            "When a plan last found out what is new at the source; none before the first.",
            _OF_PIPELINE,
        ),
        Described("tidegate_paused", "gauge", "1 while a person has paused the pipeline.", _OF_PIPELINE),
        Described("tidegate_paused_timestamp_seconds", "gauge", "When it was paused; none while it is not.", _OF_PIPELINE),
        Described(
            "tidegate_hole",
            "gauge",
            "1 if commits are missing that are known: the database was restored, copied or promoted (HOLE_DETECTED).",
            _OF_PIPELINE,
        ),
        Described("tidegate_quarantine_records", "gauge", "Bad records that wait in quarantine.", _OF_PIPELINE),
        Described("tidegate_acks_due", "gauge", "Committed batches whose source has not been notified yet.", _OF_PIPELINE),
        Described("tidegate_staged_attempts", "gauge", "Attempts whose staging tables are kept.", _OF_PIPELINE),
        Described("tidegate_staged_bytes", "gauge", "Bytes that were copied into these tables.", _OF_PIPELINE),
        Described("tidegate_staging_tables", "gauge", "Tables in schema staging, of all pipelines."),
        Described("tidegate_source_rows", "counter", "Source rows of committed batches, by their first commit.", _OF_PIPELINE),
        Described("tidegate_quarantined_rows", "counter", "Of these, set aside as bad records.", _OF_PIPELINE),
        Described(
            "tidegate_set_aside",
            "counter",
            "Partials that commits have set aside: too late for a final window, or found by a check.",
            _OF_PIPELINE,
        ),
        Described("tidegate_skipped_batches", "counter", "Committed txids whose batch was given up.", _OF_PIPELINE),
        Described(
            "tidegate_attempts",
            "counter",
            "Attempts that have ended: processed, failed, or fenced by a newer one.",
            (*_OF_PIPELINE, "outcome"),
        ),
        Described(
            "tidegate_failures",
            "counter",
            "Failed attempts by the error's code and where its cause lies.",
            (*_OF_PIPELINE, "code", "fault"),
        ),
        Described(
            "tidegate_phase_seconds",
            "histogram",
            "Of committed batches: process (read, compute, stage), seal, wait for the turn, commit.",
            (*_OF_PIPELINE, "phase"),
        ),
        Described(
            "tidegate_commit_latency_seconds", "histogram", "Of committed batches: from the seal to the merge.", _OF_PIPELINE
        ),
    )
}
FAMILIES: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


def families(measures: Measures | None, seconds: float) -> Iterator[Metric]:
    """Yield the metrics of one scrape, in the order of METRICS; only the first three without measures."""
    made = {name: FAMILIES[d.kind](name, d.help, labels=d.labels) for name, d in METRICS.items()}
    made["tidegate_up"].add_metric([], int(measures is not None))
    made["tidegate_scrape_duration_seconds"].add_metric([], seconds)
    made["tidegate_build"].add_metric([version("tidegate")], 1)
    if measures is not None:
        made["tidegate_staging_tables"].add_metric([], measures.staging_tables)
        for pipeline in measures.pipelines:
            _add_present(made, pipeline)
            _add_totals(made, pipeline)
    yield from (family for family in made.values() if family.samples)


def _add_present(made: dict[str, Any], p: PipelineMeasures) -> None:
    values = {
        "tidegate_committed_txid": p.committed,
        "tidegate_opened_txid": p.opened,
        "tidegate_lag_txids": p.opened - p.committed,
        "tidegate_lag_seconds": p.lag_seconds,
        "tidegate_last_commit_timestamp_seconds": _timestamp(p.committed_at),
        "tidegate_last_plan_timestamp_seconds": _timestamp(p.planned_at),
        "tidegate_paused": int(p.paused_at is not None),
        "tidegate_paused_timestamp_seconds": _timestamp(p.paused_at),
        "tidegate_hole": int(not p.is_whole),
        "tidegate_quarantine_records": p.quarantined,
        "tidegate_acks_due": p.acks_due,
        "tidegate_staged_attempts": p.staged_attempts,
        "tidegate_staged_bytes": p.staged_bytes,
    }
    for name, value in values.items():
        if value is not None:
            made[name].add_metric([p.pipeline], value)
    for phase, count in p.phases.items():
        made["tidegate_batches"].add_metric([p.pipeline, phase], count)
    counted: Counter[tuple[str, ...]] = Counter()
    for (phase, word), count in p.errors.items():
        counted[phase, *_code_labels(word)] += count
    for labels, count in counted.items():
        made["tidegate_batch_errors"].add_metric([p.pipeline, *labels], count)
    if p.failed_plans:
        made["tidegate_failed_plans"].add_metric([p.pipeline, *_code_labels(p.plan_error)], p.failed_plans)


def _add_totals(made: dict[str, Any], p: PipelineMeasures) -> None:
    if p.totals is None:
        return
    made["tidegate_source_rows"].add_metric([p.pipeline], p.totals.source_rows)
    made["tidegate_quarantined_rows"].add_metric([p.pipeline], p.totals.quarantined_rows)
    made["tidegate_set_aside"].add_metric([p.pipeline], p.totals.set_aside)
    made["tidegate_skipped_batches"].add_metric([p.pipeline], p.totals.skipped)
    outcomes = Counter(processed=0, failed=0, fenced=0)  # a rate needs a series that begins at 0
    codes: Counter[tuple[str, str]] = Counter()
    for word, count in p.totals.attempts.items():
        outcome = {SEALED: "processed", FENCED: "fenced"}.get(word, "failed")
        outcomes[outcome] += count
        if outcome == "failed":
            codes[_code_labels(word)] += count
    for outcome, count in outcomes.items():
        made["tidegate_attempts"].add_metric([p.pipeline, outcome], count)
    for labels, count in codes.items():
        made["tidegate_failures"].add_metric([p.pipeline, *labels], count)
    for phase in PHASES:
        name = "tidegate_commit_latency_seconds" if phase == LATENCY else "tidegate_phase_seconds"
        values = [p.pipeline] if phase == LATENCY else [p.pipeline, phase]
        histogram = p.totals.seconds[phase]
        made[name].add_metric(values, _buckets(histogram), histogram.microseconds / MICROSECONDS)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return Prometheus' buckets: for each upper bound, how many batches took that long or less."""
    bounds = [*map(floatToGoString, BOUNDS_SECONDS), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))


def _timestamp(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _code_labels(error: str) -> tuple[str, str]:
    """Return the labels of an error: few, because the name of another exception is anybody's choice."""
    code, fault = code_and_fault(error)
    return code, fault.name.lower()
