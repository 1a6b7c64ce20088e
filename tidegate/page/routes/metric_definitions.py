"""The metrics of the ledger by name, and how they follow from its measures.

`METRICS` lists them all: the page's endpoint, the documentation, the dashboard and the alert rules are compared with it.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from tidegate.state_store.base.errors import code_and_fault
from tidegate.state_store.read_ledger.metric_values import Measures, PipelineMeasures


@dataclass(frozen=True)
class Described:
    """A metric as people see it; each is a gauge. One that each pipeline has once has its `value`, None while there is none."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    value: Callable[[PipelineMeasures], float | None] | None = None


_OF_PIPELINE = ("pipeline",)


def _of(name: str, text: str, value: Callable[[PipelineMeasures], float | None]) -> Described:
    return Described(name, text, _OF_PIPELINE, value)


METRICS = {
    described.name: described
    for described in (
        Described("tidegate_up", "1 if the ledger could be read. If 0, all other metrics but the next two are missing."),
        Described("tidegate_scrape_duration_seconds", "How long reading the ledger took for this scrape."),
        Described("tidegate_build", "Always 1; the label is Tidegate's version.", ("version",)),
        _of("tidegate_committed_txid", "Last txid that has committed; 0 before the first.", lambda p: p.committed),
        _of("tidegate_opened_txid", "Last txid that was planned.", lambda p: p.opened),
        _of("tidegate_lag_txids", "Batches that were planned and have not committed.", lambda p: p.opened - p.committed),
        _of("tidegate_lag_seconds", "Age of the oldest batch that has not committed; 0 if none.", lambda p: p.lag_seconds),
        _of(
            "tidegate_last_commit_timestamp_seconds",
            "When the last txid committed; none before the first.",
            lambda p: _timestamp(p.committed_at),
        ),
        Described("tidegate_batches", "Batches that were planned and have not committed, by phase.", (*_OF_PIPELINE, "phase")),
        Described(
            "tidegate_batch_errors",
            "Of these, those that failed or are halted, by the error's code and where its cause lies.",
            (*_OF_PIPELINE, "phase", "code", "fault"),
        ),
        _of("tidegate_tries", "Attempts at the batch that has had most, of those that have not committed.", lambda p: p.tries),
        _of(
            "tidegate_last_skip_timestamp_seconds",
            "When the newest batch was given up that is among the last 200 txids; none if none was.",
            lambda p: _timestamp(p.skipped_at),
        ),
        _of(
            "tidegate_last_set_aside_timestamp_seconds",
            "When a commit, of the last 200, last set partials aside: late for a final window, or found by a check.",
            lambda p: _timestamp(p.set_aside_at),
        ),
        Described(
            "tidegate_failed_plans",
            "Plans that have failed since one succeeded, by the newest error's code and where its cause lies; none if none.",
            (*_OF_PIPELINE, "code", "fault"),
        ),
        _of(
            "tidegate_last_plan_timestamp_seconds",
            "When a plan last found out what is new at the source; none before the first.",
            lambda p: _timestamp(p.planned_at),
        ),
        _of("tidegate_paused", "1 while a person has paused the pipeline.", lambda p: int(p.paused_at is not None)),
        _of(
            "tidegate_paused_timestamp_seconds", "When it was paused; none while it is not.", lambda p: _timestamp(p.paused_at)
        ),
        _of(
            "tidegate_hole",
            "1 if commits are missing that are known: the database was restored, copied or promoted (HOLE_DETECTED).",
            lambda p: int(not p.is_whole),
        ),
        _of("tidegate_quarantine_records", "Bad records that wait in quarantine.", lambda p: p.quarantined),
        _of(
            "tidegate_new_columns",
            "Columns of the source that came after the first batch, undeclared.",
            lambda p: p.new_columns,
        ),
        _of("tidegate_acks_due", "Committed batches whose source has not been notified yet.", lambda p: p.acks_due),
        _of("tidegate_staged_attempts", "Attempts whose staging tables are kept.", lambda p: p.staged_attempts),
        _of("tidegate_staged_bytes", "Bytes that were copied into these tables.", lambda p: p.staged_bytes),
        Described("tidegate_staging_tables", "Tables in schema staging, of all pipelines."),
    )
}


def families(measures: Measures | None, seconds: float) -> Iterator[Metric]:
    """Yield the metrics of one scrape, in the order of METRICS; only the first three without measures."""
    made = {name: GaugeMetricFamily(name, d.help, labels=d.labels) for name, d in METRICS.items()}
    made["tidegate_up"].add_metric([], int(measures is not None))
    made["tidegate_scrape_duration_seconds"].add_metric([], seconds)
    made["tidegate_build"].add_metric([version("tidegate")], 1)
    if measures is not None:
        made["tidegate_staging_tables"].add_metric([], measures.staging_tables)
        for pipeline in measures.pipelines:
            _add_present(made, pipeline)
    yield from (family for family in made.values() if family.samples)


def _add_present(made: dict[str, GaugeMetricFamily], p: PipelineMeasures) -> None:
    for described in METRICS.values():
        if described.value is not None and (value := described.value(p)) is not None:
            made[described.name].add_metric([p.pipeline], value)
    for phase, count in p.phases.items():
        made["tidegate_batches"].add_metric([p.pipeline, phase], count)
    counted: Counter[tuple[str, ...]] = Counter()
    for (phase, word), count in p.errors.items():
        counted[phase, *_code_labels(word)] += count
    for labels, count in counted.items():
        made["tidegate_batch_errors"].add_metric([p.pipeline, *labels], count)
    if p.failed_plans:
        made["tidegate_failed_plans"].add_metric([p.pipeline, *_code_labels(p.plan_error)], p.failed_plans)


def _timestamp(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _code_labels(error: str) -> tuple[str, str]:
    """Return the labels of an error: few, because the name of another exception is anybody's choice."""
    code, fault = code_and_fault(error)
    return code, fault.name.lower()
