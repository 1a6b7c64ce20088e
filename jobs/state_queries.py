"""State queries: what a transform may read of committed states, and the function with which it does.

    Pipeline(..., transform=compare, queries=[StateQuery("planes.by_tail")])

    def compare(rows):
        return state_query(rows, "planes.by_tail", on=["tail"], columns={"seats": "seats_before"})

The declaration says as of when a state is read. So it is known, before anything runs, whether a batch waits for the one before
it, and whether a replay reads the same values.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from tidegate.state_store.base.errors import DeclarationInvalid
from tidegate.state_store.declarations.pipeline_spec import AsOf, PipelineSpec, StateRead, check_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

How = Literal["left", "inner", "anti"]
# Columns: names that rows and state share, or a mapping of the state's names to those of the rows.
Names = Sequence[str] | Mapping[str, str]


@dataclass(frozen=True)
class StateQuery:
    """A state that a pipeline's transform reads with `state_query`: ``StateQuery("planes.by_tail")``.

    ``as_of="previous txid"`` reads a state of the pipeline's own as the batch before has left it. Every attempt reads the same,
    because a batch begins only when the one before it has committed: the pipeline has a window of 1.

    ``as_of="latest"`` reads a state of any pipeline as it is when the attempt begins. Another attempt at the same batch may
    read other values. Each batch still counts exactly once, but what it comes to depends on when it was tried. So a pipeline
    that is exactly once has to say ``allow_not_repeatable=True``.
    """

    of: str
    as_of: AsOf = "previous txid"
    allow_not_repeatable: bool = False

    def __post_init__(self) -> None:
        check_of(self.of)
        if self.as_of not in get_args(AsOf):
            raise ValueError(f"StateQuery({self.of!r}) has as_of={self.as_of!r}; use one of {', '.join(get_args(AsOf))}.")

    @property
    def read(self) -> StateRead:
        """Return the store's view of this query."""
        return StateRead(self.of, self.as_of)

    @property
    def is_repeatable(self) -> bool:
        """Return whether each attempt reads the same."""
        return self.as_of == "previous txid"


def check(spec: PipelineSpec, queries: Sequence[StateQuery], *, is_exactly_once: bool) -> None:
    """Refuse queries that could not be answered as declared.

    Raises: ValueError.
    """
    if twice := [query.of for query in queries if [other.of for other in queries].count(query.of) > 1]:
        raise ValueError(f"Pipeline {spec.name} queries {twice[0]} twice: one StateQuery is enough for any number of calls.")
    for query in queries:
        begin = f"Pipeline {spec.name} queries {query.of} as of {query.as_of}"
        if reason := _why_unanswerable(spec, query):
            raise ValueError(f"{begin}{reason}")
        if is_exactly_once and not query.is_repeatable and not query.allow_not_repeatable:
            raise ValueError(
                f"{begin}: another attempt at a batch may read other values, so what a batch comes to depends on when it was "
                "tried. Say allow_not_repeatable=True if each batch may; it still counts exactly once."
            )


def _why_unanswerable(spec: PipelineSpec, query: StateQuery) -> str | None:
    """Return why a query cannot be answered, as a sentence's end; other pipelines' states are not checked yet."""
    if query.read.pipeline != spec.name:
        return ': the txids of another pipeline are others. Say as_of="latest".' if query.is_repeatable else None
    state = spec.state(query.read.state)
    if state is None:
        return f", and has no such state. It has {', '.join(each.name for each in spec.states)}."
    if not state.is_by_key:
        return ": only a State or a Newest has rows by key."
    if query.is_repeatable and not state.has_txid:
        return ": a non-transactional state does not know which txid wrote a row."
    if query.is_repeatable and state.window is not None and state.window.keep is not None:
        return ", which keeps windows for a time: a redo would miss those that its batch has removed. Leave keep out."
    return None


class Answers(Protocol):
    """The interface by which a running transform's state queries are answered."""

    def look_up(
        self, rows: "DataFrame", of: str, on: Mapping[str, str], columns: Mapping[str, str] | None, how: How
    ) -> "DataFrame":
        """Return the rows with columns of the state, as `state_query`; `on` and `columns` map its names to the rows'."""


_answers: ContextVar[Answers | None] = ContextVar("answers to state queries", default=None)


@contextmanager
def answered_by(answers: Answers) -> Iterator[None]:
    """Answer state queries within the block, such as while a transform runs."""
    token = _answers.set(answers)
    try:
        yield
    finally:
        _answers.reset(token)


def state_query(rows: "DataFrame", of: str, *, on: Names = (), columns: Names | None = None, how: How = "left") -> "DataFrame":
    """Return the rows of a batch with columns of a committed state, found by its key, for use in a transform.

    `of` is the state, ``pipeline.state``, which the pipeline declares as a `StateQuery`. `on` names the columns of its key, all
    of them and in any order, or maps each to the column of the rows that has it; a state without a key needs none. The types
    have to be the same. `columns` names columns of the state, or maps them to other names; by default its values, with those
    that are derived. `txid`, that of the batch that wrote the row, is one too. An array and a uuid are strings, as Postgres
    writes them.

    Rows whose key the state does not have get NULLs ("left"), or are left out ("inner"). With ``how="anti"``, only those stay,
    without new columns. NULL in a key finds a row only if the state keeps NULLs as a group (`null_keys`). The number of rows
    never grows.

    Spark's tasks look up the keys in their rows; nothing is collected in the driver. At most as many tasks do so at a time as
    the setting `staging_connections` allows, each over a connection per query.

    Raises: DeclarationInvalid if the state is not declared, or on, columns, how or a type is wrong.
    """
    answers = _answers.get()
    if answers is None:
        raise DeclarationInvalid(
            f"state_query({of!r}) is not called by a transform while a batch is computed. Call it there; in tests, "
            "tidegate.jobs.testing.partials(PIPELINE, rows, states={...}) gives it the states."
        )
    if how not in get_args(How):
        raise DeclarationInvalid(f"state_query({of!r}) has how={how!r}; use one of {', '.join(get_args(How))}.")
    return answers.look_up(rows, of, _mapping(on), None if columns is None else _mapping(columns), how)


def _mapping(names: Names) -> Mapping[str, str]:
    if isinstance(names, str):
        raise DeclarationInvalid(f"state_query needs a list of columns, or a mapping, and not the text {names!r}.")
    return names if isinstance(names, Mapping) else {name: name for name in names}
