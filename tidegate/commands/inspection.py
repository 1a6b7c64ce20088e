"""The verbs inspect and get, which show the ledger and states."""

import csv
import io
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs.pipeline import Pipeline
from jobs.registry import find_pipeline
from state_store import lookup
from state_store.declaration import StateSpec
from state_store.errors import SourceUnreadable, UsageError
from state_store.settings import Settings
from tidegate import batch_report, output, source_report
from tidegate.commands import AT_LEAST_ONE, as_json, pipeline_name

if TYPE_CHECKING:
    from state_store import StateStore
    from state_store.history import BatchStatus

ROWS_FOR_PEOPLE = 20
NOT_FOUND = 1


@click.command()
@pipeline_name
@click.option("--txid", metavar="TXID", type=AT_LEAST_ONE, help="Show all of one batch.")
@click.option("--state", metavar="NAME", help="Show the rows of this state, in the order of their keys.")
@click.option("--source", is_flag=True, help="Show what the source leaves unread, with the reasons.")
@click.option("--limit", metavar="N", type=AT_LEAST_ONE, help=f"At most N rows [tables: {ROWS_FOR_PEOPLE}; JSON: all].")
@as_json
def inspect(pipeline: str, txid: int | None, state: str | None, source: bool, limit: int | None, as_json: bool) -> None:
    """Show the ledger (one row per txid, newest last), one batch, a state, or what the source leaves alone."""
    if (txid is not None) + (state is not None) + source > 1:
        raise UsageError("Give one of --txid, --state and --source.")
    from state_store import StateStore  # noqa: PLC0415 - get, beside it, does without SQLAlchemy

    declared, settings = find_pipeline(pipeline), Settings.load()
    if source:
        source_report.show(declared, settings, limit, as_json)
        return
    with StateStore.connect(settings) as store:
        if txid is not None:
            _show_batch(store, pipeline, txid, as_json)
        elif state is not None:
            _show_state(store, declared, state, limit, as_json)
        else:
            statuses = store.batch_statuses(pipeline, limit=limit or (sys.maxsize if as_json else ROWS_FOR_PEOPLE))
            if as_json:
                output.print_json_rows(asdict(status) for status in statuses)
            else:
                _print_ledger(pipeline, statuses)
                if message := source_report.sentence(pipeline, settings):
                    output.say(message)


@click.command()
@pipeline_name
@click.argument("state", help="The state's name.")
@click.argument("key", nargs=-1, help="The key's values in their order; several keys one after another.")
@click.option(
    "--keys-from",
    metavar="FILE",
    help='CSV file with one key a record, no header; "" is an empty text; - reads standard input.',
)
@as_json
def get(pipeline: str, state: str, key: tuple[str, ...], keys_from: str | None, as_json: bool) -> None:
    """Look up keys in a state. Exits with 1 if one of them has no row."""
    spec = _state(find_pipeline(pipeline), state)
    width = len(spec.keys)
    if len(key) % width or (not key and not keys_from):
        names = " ".join(column.name.upper() for column in spec.keys)
        raise UsageError(f"State {state} is keyed by {width} value(s): tidegate get {pipeline} {state} {names}")
    keys = [key[start : start + width] for start in range(0, len(key), width)]
    keys += list(_keys_of_file(keys_from, width)) if keys_from else []
    rows = lookup.get(Settings.load(), spec, keys)
    if as_json:
        output.print_json_rows({"key": list(k), "row": row} for k, row in zip(keys, rows, strict=True))
    elif found := [row for row in rows if row is not None]:
        output.print_table(None, list(found[0]), [list(row.values()) for row in found])
    missing = [k for k, row in zip(keys, rows, strict=True) if row is None]
    for absent in missing[:ROWS_FOR_PEOPLE]:
        output.say(f"State {state} has no row for {shlex.join(absent)}.")
    if missing:
        raise click.exceptions.Exit(NOT_FOUND)


def _show_state(store: "StateStore", pipeline: Pipeline, name: str, limit: int | None, as_json: bool) -> None:
    spec = _state(pipeline, name)
    if as_json:
        output.print_json_rows(store.state_rows(spec, limit))
        return
    shown = limit or ROWS_FOR_PEOPLE
    rows = list(islice(store.state_rows(spec, shown + 1), shown + 1))
    columns = [*(column.name for column in spec.columns), "txid"]
    output.print_table(f"State {name}", columns, [list(row.values()) for row in rows[:shown]])
    if len(rows) > shown:
        output.say("There are more rows: --limit N shows more, --json all of them.")


def _show_batch(store: "StateStore", pipeline: str, txid: int, as_json: bool) -> None:
    history = store.batch_history(pipeline, txid)
    if as_json:
        output.print_json(asdict(history))
        return
    batch_report.show(history)


def _print_ledger(pipeline: str, statuses: "list[BatchStatus]") -> None:
    if not statuses:
        output.say(f"Pipeline {pipeline} has no batches yet. Start with: tidegate trigger {pipeline} --wait")
        return
    shown = [f.name for f in fields(statuses[0]) if f.name not in ("pipeline", "started_at", "owner")]
    output.print_table(f"Batches of {pipeline}", shown, [[getattr(status, name) for name in shown] for status in statuses])


def _state(pipeline: Pipeline, name: str) -> StateSpec:
    if spec := pipeline.spec.state(name):
        return spec
    raise UsageError(f"Pipeline {pipeline.name} has no state {name}. States: {', '.join(pipeline.states)}.")


def _keys_of_file(name: str, width: int) -> Iterator[tuple[str, ...]]:
    """Yield the keys of a CSV file without a header. A key may hold line ends, "" is the empty key, blank lines are ignored.

    Raises: SourceUnreadable, UsageError with the line.
    """
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise SourceUnreadable(f"{name} cannot be read: {reason}. Name a CSV file with one key a line.") from error
    keys = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for values in keys:
            if values and len(values) != width:
                raise UsageError(f"{name}, line {keys.line_num}: {len(values)} value(s), the key has {width}.")
            if values:
                yield tuple(values)
    except csv.Error as error:
        raise UsageError(f"{name}, line {keys.line_num}: this is no CSV: {error}.") from None
