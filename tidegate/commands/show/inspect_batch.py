"""What `inspect --txid` prints of one batch: its input, attempts with times and rows, its commit, operators' actions."""

import itertools
import textwrap
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tidegate import output
from tidegate.explain.attempt_outcome import outcome

if TYPE_CHECKING:
    from tidegate.state_store.declarations.pipeline_spec import SourceMetadata
    from tidegate.state_store.read_ledger.batch_status import BatchHistory

TEXT_CHARACTERS = 84

Row = dict[str, Any]


def show(history: "BatchHistory") -> None:
    """Print everything that the ledger knows about a batch, as tables."""
    status = history.status
    output.print_table(f"{status.pipeline} {status.txid}", ["fact", "value"], list(_facts(history)))
    _show_source(history.source_metadata)
    if history.attempts:
        _show_attempts(history)
    if history.seals:
        names = ["attempt", "state", "partition", "task_attempt", "rows", "digest"]
        _print("Sealed partitions", names, [[seal[name] for name in names] for seal in history.seals])
    if history.checks:
        rows = [[c["name"], "passed" if c["found"] is None else _wrapped(f"finds {c['found']}", 60)] for c in history.checks]
        _print("Checks", ["check", "outcome"], rows)
    if history.actions:
        names = ["acted_at", "action", "txid", "owner", "reason"]
        rows = [[*(action[name] for name in names[:-1]), _wrapped(action["reason"], 50)] for action in history.actions]
        _print("Done by hand", names, rows)


def _facts(history: "BatchHistory") -> Iterator[list[Any]]:
    status, commit = history.status, history.commit or {}
    facts = {
        "phase": status.phase,
        "waits_for": status.waits_for,
        "skipped_reason": commit.get("skipped_reason"),
        "attempt": status.attempt,
        "source_rows": status.source_rows,
        "quarantined_rows": commit.get("quarantined_rows"),
        "key_count": status.key_count,
        "opened_at": status.opened_at,
        "committed_at": status.committed_at,
        "committed_by": commit.get("owner"),
        "source_digest": history.source_digest,
    }
    for name, value in facts.items():
        if value is not None:
            yield [name, _wrapped(value, TEXT_CHARACTERS) if isinstance(value, str) else value]


def _show_attempts(history: "BatchHistory") -> None:
    attempts, commit = history.attempts, history.commit
    rows = [[a["attempt"], a["started_at"], *_durations(a, commit), outcome(a, history)] for a in attempts]
    _print("Attempts", ["attempt", "started_at", "processing", "sealing", "waiting", "merging", "outcome"], rows)
    if errors := [[a["attempt"], _wrapped(a["error"], TEXT_CHARACTERS)] for a in attempts if a["error"]]:
        _print("Why attempts failed", ["attempt", "error"], errors)
    names = [
        "attempt",
        "source_rows",
        "quarantined_rows",
        "transformed_rows",
        "staged_bytes",
        "source_hash_sum",
        "transformed_hash_sum",
    ]
    if sums := [[a[name] for name in names] for a in attempts if a["sealed_at"]]:
        _print("What attempts sealed", names, sums)
    _print(
        "Where attempts ran",
        ["attempt", "owner", "airflow_task", "try", "spark_application", "spark_tag"],
        [
            [
                a["attempt"],
                a["airflow_run_id"] or a["owner"],
                a["airflow_task_id"],
                a["airflow_try"],
                a["spark_application"],
                a["spark_tag"],
            ]
            for a in attempts
        ],
    )


def _durations(attempt: Row, commit: Row | None) -> list[str | None]:
    """Return the durations of an attempt's processing, sealing, waiting and merging; None for each that never ended."""
    staged_at, sealed_at = attempt["staged_at"] or attempt["failed_at"], attempt["sealed_at"]
    moments = [attempt["started_at"], staged_at, sealed_at, None, None]
    # The commit of a batch that was redone is older than the attempt that counts now.
    if commit is not None and commit["attempt"] == attempt["attempt"] and sealed_at and sealed_at <= commit["committed_at"]:
        moments[3:] = commit["committed_at"], commit["merged_at"]
    return [_duration(begun, ended) for begun, ended in itertools.pairwise(moments)]


def _duration(begun: datetime | None, ended: datetime | None) -> str | None:
    if begun is None or ended is None:
        return None
    seconds = (ended - begun).total_seconds()
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _show_source(metadata: "SourceMetadata", of: str = "") -> None:
    """Print the batch's input: files as a table, positions and all else as JSON; `of` says which of several inputs it is."""
    from tidegate.state_store.ledger.batches import QUARANTINED  # noqa: PLC0415 - loads SQLAlchemy

    if QUARANTINED in metadata:
        _show_replay(metadata, metadata[QUARANTINED])
    elif {"inputs", "idle", "references"} <= metadata.keys():
        _show_inputs(metadata)
    elif (files := metadata.get("files")) and all({"name", "size", "sha256"} <= file.keys() for file in files):
        _print(f"Files{of}", ["name", "bytes", "sha256"], [[f["name"], f["size"], f["sha256"]] for f in files])
    else:
        output.out().print(f"\nSource{of}")
        output.print_json(metadata)


def _show_replay(metadata: "SourceMetadata", records: int) -> None:
    if "records" in metadata:
        _print("Source: quarantine", ["input", "records"], [[name, number] for name, number in metadata["records"].items()])
    else:
        _print("Source: quarantine", ["records"], [[records]])
    for name, version in metadata.get("references", {}).items():
        _show_source(version, f" of reference {name}")


def _show_inputs(metadata: "SourceMetadata") -> None:
    for name, share in metadata["inputs"].items():
        _show_source(share, f" of input {name}")
    if metadata["idle"]:
        _print("Inputs without new rows", ["input"], [[name] for name in sorted(metadata["idle"])])
    for name, version in metadata["references"].items():
        _show_source(version, f" of reference {name}")


def _print(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """Print a table after a blank line, without its empty columns."""
    shown = [position for position in range(len(columns)) if any(row[position] is not None for row in rows)]
    output.out().print()
    output.print_table(
        title, [columns[position] for position in shown], [[row[position] for position in shown] for row in rows]
    )


def _wrapped(text: str, width: int) -> list[str]:
    """Return the text in lines of this width; paths stay whole, so they can be copied."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
