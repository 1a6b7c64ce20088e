"""The verbs get and changes, which show the rows of states, and what each txid changed in them."""

import shlex
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from tidegate import completion, output
from tidegate.commands import AT_LEAST_ONE, as_json, connected, pipeline_name
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.registry import find_pipeline
from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import StateSpec
from tidegate.state_store.states import key_lookup

if TYPE_CHECKING:
    from tidegate.state_store import StateStore

ROWS_FOR_PEOPLE = 20
NOT_FOUND = 1


@click.command()
@pipeline_name
@click.argument("state", shell_complete=completion.states, help="The state's name.")
@click.argument(
    "key",
    nargs=-1,
    help="The key's values in their order; several keys one after another; after -- they may begin with a dash.",
)
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


def show_rows(store: "StateStore", pipeline: Pipeline, name: str, limit: int | None, as_json: bool) -> None:
    """Print the rows of a state in the order of their keys, at most so many."""
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
