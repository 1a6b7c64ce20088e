"""The verbs for bad records that were set aside: list, mend and replay."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tidegate import operator_actions, output
from tidegate.commands import AT_LEAST_ONE, as_json, connected, pipeline_name
from tidegate.commands.act import run_verbs
from tidegate.commands.act.operator_name import operator
from tidegate.commands.act.operator_verbs import reason
from tidegate.jobs.registry import find_pipeline
from tidegate.jobs.sources.binding import emitter_of, replayed_with
from tidegate.operator_actions import require_reason
from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.base.settings import Settings

if TYPE_CHECKING:
    from tidegate.jobs.pipeline import Pipeline
    from tidegate.state_store.operate.mended_records import Original

ROWS_FOR_PEOPLE = 20
PAYLOAD_CHARACTERS = 60

of_txid = click.option("--txid", metavar="TXID", type=AT_LEAST_ONE, help="Only records that this txid has set aside.")


@click.group()
def quarantine() -> None:
    """Bad records that were set aside: look at them, mend them, take them up again."""


@quarantine.command("list")
@pipeline_name
@of_txid
@click.option("--limit", metavar="N", type=AT_LEAST_ONE, help=f"At most N records [tables: {ROWS_FOR_PEOPLE}; JSON: all].")
@as_json
def list_records(pipeline: str, txid: int | None, limit: int | None, as_json: bool) -> None:
    """Show what is in quarantine: records that wait, how they were mended, and what commits have set aside for good."""
    find_pipeline(pipeline)
    with connected() as store:
        store.committed(pipeline)  # fails if the pipeline is not registered
        if txid is not None:
            store.source_metadata(pipeline, txid)  # fails if the batch does not exist
        if as_json:
            output.print_json_rows(store.quarantined(pipeline, txid=txid, limit=limit))
            return
        counts = store.quarantine_counts(pipeline, txid)
        if not counts:
            output.say(f"No record of {operator_actions.named(pipeline, txid)} waits in quarantine.")
            return
        totals = store.quarantine_totals(pipeline, txid)
        aside = f"; set aside for good: {totals.set_aside}" if totals.set_aside else ""
        output.print_table(f"Waiting in quarantine: {totals.waiting}{aside}", ["txid", "records"], counts.items())
        output.out().print()
        shown = list(store.quarantined(pipeline, txid=txid, limit=limit or ROWS_FOR_PEOPLE))
    columns = ["txid", "number", "reason", "origin", "payload"]
    rows = [[row["txid"], row["number"], row["reason"], row["origin"], _shortened(row["payload"])] for row in shown]
    if any(row["mended_at"] for row in shown):
        columns.append("mended")
        for cells, row in zip(rows, shown, strict=True):
            cells.append(_shortened(row["mended_payload"]) if row["mended_at"] else None)
    output.print_table("Records", columns, rows)
    if late := sorted({row["state"] for row in shown if row["state"]}):
        output.say(f"What the commits of {', '.join(late)} have set aside stays here; it is neither replayed nor mended.")
    if len(shown) < sum(counts.values()):
        output.say("There are more records: --limit N shows more, --json all of them, uncut.")


@quarantine.command()
@pipeline_name
@click.argument("txid", type=AT_LEAST_ONE, help="The txid that has set the record aside.")
@click.argument("number", type=AT_LEAST_ONE, help="The record's number within that txid; see: tidegate quarantine list")
@reason
@click.option("--payload", metavar="TEXT", help="The whole record as it should have been.")
@click.option("--payload-from", metavar="FILE", help="Read it from this file, in UTF-8; - reads standard input.")
@click.option("--again", is_flag=True, help="Replace an earlier mend of this record.")
@as_json
def mend(
    pipeline: str,
    txid: int,
    number: int,
    reason: str,
    payload: str | None,
    payload_from: str | None,
    again: bool,
    as_json: bool,
) -> None:
    """Correct one record that waits: the next replay reads the mended one. The ledger keeps the original, operator, reason.

    A record that could not be read is mended as it stands in its source; one that failed a check as JSON of all its columns. If
    Spark answers, it is tried whether source and checks take it now.
    """
    from tidegate.state_store.operate.mended_records import Mend  # noqa: PLC0415 - loads SQLAlchemy

    declared = find_pipeline(pipeline)
    why = require_reason(reason, "the till wrote seven for 7")
    if (payload is None) == (payload_from is None):
        raise UsageError("Give the mended record by one of --payload and --payload-from.")
    text = payload if payload_from is None else _content_of(payload_from)
    by = operator("quarantine mend")
    with connected() as store:
        original = store.mend_quarantined(pipeline, txid, number, Mend(text or "", by, why, again))
    tried = _try(store.settings, declared, original, text or "")
    after = f'It counts after: tidegate quarantine replay {pipeline} --txid {txid} --reason "..."'
    if tried.still_bad is not None:
        after = f"But it is still bad, and would wait again after a replay: {tried.still_bad}. Mend it once more, with --again."
    elif tried.untried is not None:
        after += f" Whether it is good now could not be tried: {tried.untried}"
    facts = {"pipeline": pipeline, "txid": txid, "number": number, "mended_by": by, **asdict(tried)}
    output.report(f"{pipeline} {txid}, record {number}, is mended. {after}", facts, as_json)


@dataclass(frozen=True)
class _Tried:
    """Why a mended record is still bad, or why that is unknown; both None if source and checks take it."""

    still_bad: str | None = None
    untried: str | None = None


def _try(settings: Settings, pipeline: "Pipeline", original: "Original", mended: str) -> _Tried:
    """Try whether a replay would take the mended record; the ledger keeps it in any case."""
    from tidegate.jobs.compute.sessions.executor_artifacts import modules_of  # noqa: PLC0415
    from tidegate.jobs.compute.sessions.session import spark_session  # noqa: PLC0415
    from tidegate.jobs.compute.stage import waiting_records  # noqa: PLC0415 - loads pyspark, which other verbs do without

    try:
        modules, packages = modules_of(pipeline), pipeline.source.executor_packages
        with spark_session(settings, pipeline.name, modules=modules, packages=packages) as spark:
            emitter = emitter_of(pipeline.source, spark, settings)
            return _Tried(still_bad=waiting_records.describe_fault(spark, pipeline, emitter, original, mended))
    except Exception as error:  # noqa: BLE001 - whatever Spark, or an author's source, raises: the mended record is kept
        return _Tried(untried=str(error).partition("\n")[0])


@quarantine.command()
@pipeline_name
@reason
@of_txid
@run_verbs.wait
@run_verbs.wait_seconds
@run_verbs.here
@as_json
def replay(pipeline: str, reason: str, txid: int | None, wait: bool, wait_seconds: int, here: bool, as_json: bool) -> None:
    """Take waiting records up again, as a batch of their own, and start a run; records that are still bad go back."""
    declared, why = find_pipeline(pipeline), require_reason(reason, "the check was too strict")
    with connected() as store:
        waits = store.quarantine_totals(pipeline, txid).waiting
        beside = replayed_with(declared.source, store.settings) if waits else None
        done, opened = operator_actions.replay(store, declared.spec, txid, operator("quarantine replay"), why, beside)
    if opened is None:
        output.report(done.message, {"replayed_txid": None, "records": 0}, as_json)
        return
    new_txid, records = opened
    prepared = run_verbs.Prepared(done.message, {"replayed_txid": new_txid, "records": records})
    run_verbs.take_up(pipeline, prepared, new_txid, wait=wait_seconds if wait else None, here=here, as_json=as_json)


def _content_of(file: str) -> str:
    from tidegate.state_store.operate.mended_records import MAX_BYTES  # noqa: PLC0415

    try:
        with sys.stdin.buffer if file == "-" else Path(file).open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UsageError(f"{file} is too long: a mended record can have {MAX_BYTES} bytes.")
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8: see its byte {error.start + 1}.") from error
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def _shortened(payload: str) -> str:
    line = " ".join(payload.splitlines())
    return line if len(line) <= PAYLOAD_CHARACTERS else f"{line[: PAYLOAD_CHARACTERS - 3]}..."
