"""The verb query, which asks a declared query of the states."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from tidegate import completion, output
from tidegate.commands import as_json
from tidegate.jobs.named_queries import Query
from tidegate.jobs.registry import all_queries
from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.base.settings import Settings

if TYPE_CHECKING:
    from tidegate.state_store.read_states.named_query_answers import Answer


@click.command()
@click.argument("name", required=False, shell_complete=completion.queries, help="The query's name [default: list all queries].")
@click.argument(
    "values", nargs=-1, metavar="[ARG]...", help="Its arguments, in their order; after -- they may begin with a dash."
)
@as_json
def query(name: str | None, values: tuple[str, ...], as_json: bool) -> None:
    """Ask a query of the states: a question that an author has declared, answered from one snapshot, without Spark."""
    found = all_queries()
    if name is None:
        _show_queries(list(found.known.values()), as_json)
        for pipeline, why in found.broken.items():
            output.say(f"The queries of {pipeline} are not known: {why}.")
        return
    answer = _ask(found.find(name), values)
    if as_json:
        output.print_json(_facts(answer))
        return
    output.print_table(None, [column for column, _ in answer.columns], [_for_people(row) for row in answer.rows])
    output.say(f"As of {', '.join(f'txid {txid} of {pipeline}' for pipeline, txid in answer.txids.items())}.")


def _ask(query: Query, values: Sequence[str]) -> "Answer":
    from tidegate.state_store.read_ledger.ledger_reader import LedgerReader  # noqa: PLC0415
    from tidegate.state_store.read_states.named_query_answers import ask  # noqa: PLC0415 - loads SQLAlchemy

    try:
        given = query.in_order(values)
    except ValueError as error:
        raise UsageError(str(error)) from error
    with LedgerReader(Settings.load()) as reader:
        return ask(reader, query, given)


def _show_queries(queries: Sequence[Query], as_json: bool) -> None:
    if as_json:
        known = ("name", "reads", "arguments", "description", "most_rows", "timeout_seconds")
        output.print_json([{name: getattr(query, name) for name in known} for query in queries])
        return
    rows = [[query.usage, ", ".join(query.reads), query.description] for query in queries]
    output.print_table("Queries", ["query", "reads", "what"], rows)


def _facts(answer: "Answer") -> dict[str, Any]:
    columns = [name for name, _ in answer.columns]
    return {
        **asdict(answer),
        "columns": [{"name": name, "type": kind} for name, kind in answer.columns],
        "rows": [dict(zip(columns, row, strict=True)) for row in answer.rows],
    }


def _for_people(row: Sequence[Any]) -> list[Any]:
    return [", ".join(map(str, value)) if isinstance(value, list) else value for value in row]
