"""Routes for queries: which there are, and their answers."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from pydantic import BaseModel

from tidegate.jobs.named_queries import Query
from tidegate.page import access, ledger_connection
from tidegate.page.declared_pipelines import queries as declared_queries
from tidegate.page.http_answers import Refusal
from tidegate.page.shared_models import Column, as_json
from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.declarations.column_spec import ColumnType
from tidegate.state_store.read_states.named_query_answers import ask

router = APIRouter(prefix="/api/queries")


class Declared(BaseModel):
    """A query as its author declares it."""

    name: str
    reads: list[str]
    arguments: dict[str, str]
    description: str


class Answered(BaseModel):
    """An answer; bigints, decimals, dates and bytes as text, as no JavaScript number holds them; arrays as lists."""

    query: str
    txids: dict[str, int]
    columns: list[Column]
    rows: list[list[Any]]


def askable(user: access.User, query: Annotated[str, Path(max_length=200)]) -> Query:
    """Return the requested query, if the user may read the Dags of all pipelines that it reads.

    A query that there is not, and one that the user may not ask, get the same answer.

    Raises: Refusal (404).
    """
    mine = _askable(user)
    if query not in mine:
        known = ", ".join(mine) or "none"
        raise Refusal(404, "UNKNOWN_QUERY", f"There is no query {query} that you may ask. Queries: {known}.")
    return mine[query]


Asked = Annotated[Query, Depends(askable)]


@router.get("")
def queries(user: access.User) -> list[Declared]:
    """Return the queries that the user may ask."""
    return [
        Declared(name=name, reads=list(query.reads), arguments=dict(query.arguments), description=query.description)
        for name, query in _askable(user).items()
    ]


@router.get("/{query}")
def answer(query: Asked, request: Request) -> Answered:
    """Return an answer; the arguments are parameters of the address, that of an array once for each value."""
    given: dict[str, Any] = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        is_array = name in query.arguments and ColumnType(query.arguments[name]).element is not None
        if len(values) > 1 and not is_array:
            raise UsageError(f"Query {query.name}: argument {name} is given {len(values)} times, and takes one value.")
        given[name] = values if is_array else values[0]
    # An array without values has no parameter.
    empty: dict[str, list[str]] = {
        name: [] for name, kind in query.arguments.items() if ColumnType(kind).element and name not in given
    }
    found = ask(ledger_connection.reader(), query, {**empty, **given})
    kinds = [kind for _, kind in found.columns]
    return Answered(
        query=found.query,
        txids=dict(found.txids),
        columns=[Column(name=name, type=kind) for name, kind in found.columns],
        rows=[[as_json(value, kind) for value, kind in zip(row, kinds, strict=True)] for row in found.rows],
    )


def _askable(user: Any) -> dict[str, Query]:
    known = declared_queries()
    readable = set(access.allowed(user, access.READ, {name for query in known.values() for name in query.pipelines}))
    return {name: query for name, query in known.items() if readable.issuperset(query.pipelines)}
