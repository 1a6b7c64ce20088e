"""The verbs for bad records that were set aside: list and replay."""

import click

from jobs.registry import find_pipeline
from state_store.settings import Settings
from tidegate import output
from tidegate.commands import AT_LEAST_ONE, as_json, pipeline_name, runs
from tidegate.commands.operations import operator, reason, require_reason

ROWS_FOR_PEOPLE = 20
PAYLOAD_CHARACTERS = 60

of_txid = click.option("--txid", metavar="TXID", type=AT_LEAST_ONE, help="Only records that this txid has set aside.")


@click.group()
def quarantine() -> None:
    """Bad records that were set aside: look at them, take them up again."""


@quarantine.command("list")
@pipeline_name
@of_txid
@click.option("--limit", metavar="N", type=AT_LEAST_ONE, help=f"At most N records [tables: {ROWS_FOR_PEOPLE}; JSON: all].")
@as_json
def list_records(pipeline: str, txid: int | None, limit: int | None, as_json: bool) -> None:
    """Show the records that wait in quarantine: reason, origin and content."""
    from state_store import StateStore  # noqa: PLC0415 - loads SQLAlchemy, which other verbs do without

    find_pipeline(pipeline)
    with StateStore.connect(Settings.load()) as store:
        store.committed(pipeline)  # fails if the pipeline is not registered
        if txid is not None:
            store.source_metadata(pipeline, txid)  # fails if the batch does not exist
        if as_json:
            output.print_json_rows(store.quarantined(pipeline, txid=txid, limit=limit))
            return
        counts = store.quarantine_counts(pipeline, txid)
        if not counts:
            output.say(f"No record of {_owner(pipeline, txid)} waits in quarantine.")
            return
        output.print_table(f"Waiting in quarantine: {sum(counts.values())}", ["txid", "records"], counts.items())
        output.out().print()
        shown = list(store.quarantined(pipeline, txid=txid, limit=limit or ROWS_FOR_PEOPLE))
    columns = ["txid", "number", "reason", "origin", "payload"]
    rows = [[row["txid"], row["number"], row["reason"], row["origin"], _shortened(row["payload"])] for row in shown]
    output.print_table("Records", columns, rows)
    if len(shown) < sum(counts.values()):
        output.say("There are more records: --limit N shows more, --json all of them, uncut.")


@quarantine.command()
@pipeline_name
@reason
@of_txid
@runs.wait
@runs.wait_seconds
@runs.here
@as_json
def replay(pipeline: str, reason: str, txid: int | None, wait: bool, wait_seconds: int, here: bool, as_json: bool) -> None:
    """Take waiting records up again, as a batch of their own, and start a run; records that are still bad go back."""
    from state_store import StateStore  # noqa: PLC0415

    spec, why = find_pipeline(pipeline).spec, require_reason(reason, "the check was too strict")
    with StateStore.connect(Settings.load()) as store:
        store.check_not_paused(pipeline)
        if txid is not None:
            store.source_metadata(pipeline, txid)
        opened = store.replay_quarantined(spec, operator("quarantine replay"), why, txid=txid)
    if opened is None:
        message = f"No record of {_owner(pipeline, txid)} waits in quarantine."
        output.print_json({"replayed_txid": None, "records": 0}) if as_json else output.say(message)
        return
    new_txid, records = opened
    message = f"{pipeline}: {records} record{'s' if records > 1 else ''} left quarantine, for txid {new_txid}."
    prepared = runs.Prepared(message, {"replayed_txid": new_txid, "records": records})
    runs.take_up(pipeline, prepared, new_txid, wait=wait_seconds if wait else None, here=here, as_json=as_json)


def _owner(pipeline: str, txid: int | None) -> str:
    return pipeline if txid is None else f"{pipeline} {txid}"


def _shortened(payload: str) -> str:
    """Return a record as one short line."""
    line = " ".join(payload.splitlines())
    return line if len(line) <= PAYLOAD_CHARACTERS else f"{line[: PAYLOAD_CHARACTERS - 3]}..."
