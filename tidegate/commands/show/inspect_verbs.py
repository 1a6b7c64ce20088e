"""The verbs inspect, get and changes, which show the ledger and states."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from tidegate import completion, output
from tidegate.commands import AT_LEAST_ONE, as_json, connected, pipeline_name
from tidegate.commands.show import batch_filters
from tidegate.explain import batch_report, remedies, source_report
from tidegate.explain.batch_causes import quoted
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.registry import find_pipeline
from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import StateSpec
from tidegate.state_store.states import key_lookup

if TYPE_CHECKING:
    from tidegate.state_store import StateStore
    from tidegate.state_store.read_ledger.batch_search import BatchFilter
    from tidegate.state_store.read_ledger.batch_status import BatchStatus

ROWS_FOR_PEOPLE = 20
PAGE = 10_000  # batches in one answer of the store
NOT_FOUND = 1


@click.command()
@pipeline_name
@click.option("--txid", metavar="TXID", type=AT_LEAST_ONE, help="Show all of one batch.")
@click.option(
    "--state", metavar="NAME", shell_complete=completion.states, help="Show the rows of this state, in the order of their keys."
)
@click.option("--source", is_flag=True, help="Show what the source leaves unread, with the reasons.")
@batch_filters.phase
@batch_filters.error
@batch_filters.since
@batch_filters.until
@batch_filters.from_txid
@batch_filters.to_txid
@click.option("--limit", metavar="N", type=AT_LEAST_ONE, help=f"At most N rows [tables: {ROWS_FOR_PEOPLE}; JSON: all].")
@as_json
def inspect(
    pipeline: str, txid: int | None, state: str | None, source: bool, limit: int | None, as_json: bool, **conditions: Any
) -> None:
    """Show the ledger (one row per txid, newest last), one batch, a state, or what the source leaves alone.

    --phase, --error, --since, --until, --from-txid and --to-txid choose batches of the ledger; all that are given have to hold.
    An event of a batch: it was opened, begun, sealed or committed, it failed, or it was halted.
    """
    given = [f"--{name.replace('_', '-')}" for name, value in conditions.items() if value is not None]
    if (txid is not None) + (state is not None) + source > 1:
        raise UsageError("Give one of --txid, --state and --source.")
    if given and (txid is not None or state is not None or source):
        raise UsageError(f"{given[0]} chooses among batches: leave out --txid, --state and --source.")
    batch_filters.check(**conditions)
    declared, settings = find_pipeline(pipeline), Settings.load()
    if source:
        source_report.show(declared, settings, limit, as_json)
        return
    with connected(settings) as store:
        if txid is not None:
            _show_batch(store, pipeline, txid, as_json)
        elif state is not None:
            _show_state(store, declared, state, limit, as_json)
        else:
            _show_ledger(store, pipeline, conditions, limit, as_json)
            if not as_json and not given:
                _show_what_is_not_planned(store, pipeline)


@click.command()
@pipeline_name
@click.argument("state", shell_complete=completion.states, help="The state's name.")
@click.argument("key", nargs=-1, help="The key's values in their order; several keys one after another.")
@click.option("--null", metavar="TEXT", help="A value of a key that is this text stands for NULL.")
@as_json
def get(pipeline: str, state: str, key: tuple[str, ...], null: str | None, as_json: bool) -> None:
    """Look up keys in a state. Exits with 1 if one of them has no row."""
    spec = _state(find_pipeline(pipeline), state)
    given = _keys(pipeline, spec, key)
    keys = [tuple(None if value == null else value for value in values) for values in given]
    rows = key_lookup.get(Settings.load(), spec, keys)
    if as_json:
        output.print_json_rows({"key": list(k), "row": row} for k, row in zip(keys, rows, strict=True))
    elif found := [row for row in rows if row is not None]:
        output.print_table(None, list(found[0]), [_for_people(row, list(row)) for row in found])
    missing = [k for k, row in zip(given, rows, strict=True) if row is None]
    for absent in missing[:ROWS_FOR_PEOPLE]:
        output.say(f"State {state} has no row for {shlex.join(absent)}.")
    if missing:
        raise click.exceptions.Exit(NOT_FOUND)


@click.command()
@pipeline_name
@click.argument("state", shell_complete=completion.states, help="The state's name; it records changes, or appends rows.")
@click.option("--after-txid", metavar="TXID", type=click.IntRange(0), help="Only what later txids changed.")
@click.option("--limit", metavar="N", type=AT_LEAST_ONE, help=f"At most N changes [tables: {ROWS_FOR_PEOPLE}; JSON: all].")
@as_json
def changes(pipeline: str, state: str, after_txid: int | None, limit: int | None, as_json: bool) -> None:
    """Show what each txid changed in a state, in the order of txids: the values after it, and those before it."""
    spec = _state(find_pipeline(pipeline), state)
    if spec.stream is None:
        raise UsageError(f"State {state} does not record changes: declare it with changes=True, and rebuild {pipeline}.")
    with connected() as store:
        if as_json:
            output.print_json_rows(store.changes(spec, after_txid or 0, limit))
            return
        shown = limit or ROWS_FOR_PEOPLE
        rows = list(islice(store.changes(spec, after_txid or 0, shown + 1), shown + 1))
        pruned = store.pruned_txid(spec)
    columns = [column.name for column in spec.stream[1]]
    output.print_table(f"Changes of {state}", columns, [_for_people(row, columns) for row in rows[:shown]])
    if len(rows) > shown:
        output.say(f"There are more: --after-txid {rows[shown - 1]['txid']} shows later ones, --json all of them.")
    if pruned > (after_txid or 0):
        output.say(f"The changes by txids up to {pruned} were removed.")


def _show_state(store: "StateStore", pipeline: Pipeline, name: str, limit: int | None, as_json: bool) -> None:
    spec = _state(pipeline, name)
    if as_json:
        output.print_json_rows(store.state_rows(spec, limit))
        return
    progress = store.event_time(spec) if spec.window else None
    shown = limit or ROWS_FOR_PEOPLE
    rows = list(islice(store.state_rows(spec, shown + 1), shown + 1))
    columns = [column.name for column in spec.shown]
    output.print_table(f"State {name}", columns, [_for_people(row, columns) for row in rows[:shown]])
    if len(rows) > shown:
        output.say("There are more rows: --limit N shows more, --json all of them.")
    if progress:
        output.say(str(progress))


def _for_people(row: Mapping[str, Any], columns: list[str]) -> list[Any]:
    """Return a row's cells; an array is one text, because a list would be shown as lines."""
    values = (row[column] for column in columns)
    return [f"[{', '.join(map(str, value))}]" if isinstance(value, list) else value for value in values]


def _show_batch(store: "StateStore", pipeline: str, txid: int, as_json: bool) -> None:
    history = store.batch_history(pipeline, txid)
    if as_json:
        output.print_json(asdict(history))
        return
    batch_report.show(history)


def _show_ledger(store: "StateStore", pipeline: str, conditions: "Mapping[str, Any]", limit: int | None, as_json: bool) -> None:
    from tidegate.state_store.read_ledger.batch_search import BatchFilter  # noqa: PLC0415

    wanted, shown = BatchFilter(**conditions), limit or (sys.maxsize if as_json else ROWS_FOR_PEOPLE)
    batches, before = _newest(store, pipeline, wanted, shown)
    if as_json:
        output.print_json_rows(asdict(batch) for batch in batches)
        return
    if not batches:
        if wanted == BatchFilter():
            output.say(f"Pipeline {pipeline} has no batches yet. Start with: {remedies.run_of(pipeline, store.settings)}")
        else:
            output.say(f"No batch of {pipeline} fulfils all conditions.")
        return
    names = [f.name for f in fields(batches[0]) if f.name not in ("pipeline", "started_at", "owner", "error", "waits_for")]
    columns = [*names, *(["error"] if any(batch.error for batch in batches) else []), "waits_for"]
    output.print_table(f"Batches of {pipeline}", columns, [[getattr(b, name) for name in columns] for b in batches])
    if before is not None and wanted != BatchFilter():
        output.say("There may be earlier ones: --limit N shows more, --json all of them.")


def _show_what_is_not_planned(store: "StateStore", pipeline: str) -> None:
    """Say that plans fail, which columns nobody has declared, and what the source leaves alone."""
    from tidegate.state_store.ledger import undeclared_columns  # noqa: PLC0415

    for lag in store.lag([pipeline]):
        if lag.new_columns:
            output.say(f"{pipeline}: {undeclared_columns.sentence(lag.new_columns)} See: tidegate why {pipeline}")
        if lag.plan_error:
            times = f" {lag.failed_plans} times" if lag.failed_plans > 1 else ""
            since = f"{lag.plans_failing_since:%Y-%m-%d %H:%M:%S} UTC"
            story = f"planning has failed{times} since {since}: {quoted(lag.plan_error)}"
            output.say(f"{pipeline}: {story}. See: tidegate why {pipeline}")
    if message := source_report.sentence(pipeline, store.settings):
        output.say(message)


def _newest(store: "StateStore", pipeline: str, wanted: "BatchFilter", limit: int) -> "tuple[list[BatchStatus], int | None]":
    batches: list[BatchStatus] = []
    before: int | None = None
    while True:
        found = store.search(pipeline, wanted, before=before, limit=min(limit - len(batches), PAGE))
        batches += found.batches
        before = found.before
        if before is None or len(batches) >= limit:
            return batches[::-1], before


def _state(pipeline: Pipeline, name: str) -> StateSpec:
    if (spec := pipeline.spec.state(name)) and spec.is_table:
        return spec
    known = ", ".join(state.name for state in pipeline.spec.readable)
    raise UsageError(f"Pipeline {pipeline.name} has no state {name}. States: {known}.")


def _keys(pipeline: str, spec: StateSpec, given: tuple[str, ...]) -> list[tuple[str, ...]]:
    width = len(spec.row_key)
    if not width and not given:
        return [()]
    if not width or len(given) % width or not given:
        names = " ".join(column.name.upper() for column in spec.row_key)
        raise UsageError(
            f"State {spec.name} is keyed by {width} value(s): tidegate get {pipeline} {spec.name} {names}".rstrip()
        )
    return [given[start : start + width] for start in range(0, len(given), width)]
