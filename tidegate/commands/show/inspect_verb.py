"""The verb inspect, which shows the ledger, one batch, a state, or what the source leaves alone."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import click

from tidegate import completion, output
from tidegate.commands import AT_LEAST_ONE, as_json, connected, pipeline_name
from tidegate.commands.show import batch_filters, inspect_batch, state_verbs
from tidegate.commands.show.state_verbs import ROWS_FOR_PEOPLE
from tidegate.explain import remedies, source_report
from tidegate.explain.batch_causes import quoted
from tidegate.jobs.registry import find_pipeline
from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.base.settings import Settings

if TYPE_CHECKING:
    from tidegate.state_store import StateStore
    from tidegate.state_store.read_ledger.batch_search import BatchFilter
    from tidegate.state_store.read_ledger.batch_status import BatchStatus

PAGE = 10_000  # batches in one answer of the store


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
            state_verbs.show_rows(store, declared, state, limit, as_json)
        else:
            _show_ledger(store, pipeline, conditions, limit, as_json)
            if not as_json and not given:
                _show_what_is_not_planned(store, pipeline)


def _show_batch(store: "StateStore", pipeline: str, txid: int, as_json: bool) -> None:
    history = store.batch_history(pipeline, txid)
    if as_json:
        output.print_json(asdict(history))
        return
    inspect_batch.show(history)


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
