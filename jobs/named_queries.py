"""Query: a question to committed states, with a name, typed arguments and an answer, as Trident's distributed RPC.

    QUERIES = [Query("words_total", words_total, reads=["word_count.word_count"], arguments={"words": "text[]"})]

The list stands beside `PIPELINE` in its module. ``tidegate query words_total the cat`` and HTTP ask it (docs/queries.md).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidegate.state_store.declarations.column_spec import ColumnType, check_name
from tidegate.state_store.declarations.pipeline_spec import check_of

if TYPE_CHECKING:
    import sqlalchemy as sa

MOST_ROWS, TIMEOUT_SECONDS = 1000, 10


@dataclass(frozen=True)
class Query:
    """A named SELECT over states, with arguments; it is answered from one snapshot, without Spark.

    ``answer(states, **arguments)`` returns a SELECT of SQLAlchemy, which may join, filter and aggregate. `states` has a table
    for each of `reads`, by ``pipeline.state``: its key, values, derived values and txid, as registered. The SELECT is executed
    by a role that can change nothing. The answer is its rows, and the last txid of each pipeline in that snapshot.

    `arguments` maps names to Postgres types (`State` has the same). The last one may be an array, such as ``text[]``, and takes
    any number of values. The function gets them as Python's values.

    More than `most_rows` rows are an error, and never cut off; so is an answer that takes longer than `timeout_seconds`.

    Users of Airflow may ask it if they may read the Dags of all pipelines in `reads`.
    """

    name: str
    answer: "Callable[..., sa.Select[Any] | sa.CompoundSelect[Any]]"
    reads: Sequence[str]
    arguments: Mapping[str, str] = field(default_factory=dict)
    description: str = ""
    most_rows: int = MOST_ROWS
    timeout_seconds: int = TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        """Check the declaration.

        Raises: ValueError.
        """
        check_name("query", self.name)
        if isinstance(self.reads, str) or not self.reads:
            raise ValueError(f'Query {self.name} has to list the states that it reads: reads=["pipeline.state"].')
        for of in self.reads:
            check_of(of)
        for argument, kind in self.arguments.items():
            check_name(f"argument of query {self.name}", argument)
            ColumnType(kind)
        arrays = [argument for argument, kind in self.arguments.items() if ColumnType(kind).element]
        if arrays and arrays != [list(self.arguments)[-1]]:
            raise ValueError(f"Query {self.name}: only the last argument can be an array, as it takes all values that follow.")
        if min(self.most_rows, self.timeout_seconds) < 1:
            raise ValueError(f"Query {self.name} needs most_rows and timeout_seconds of at least 1.")
        self._check_signature()

    def _check_signature(self) -> None:
        try:
            inspect.signature(self.answer).bind(None, **dict.fromkeys(self.arguments))
        except TypeError as error:
            names = "".join(f", {name}" for name in self.arguments)
            raise ValueError(
                f"Query {self.name} calls its answer as answer(states{names}), which does not fit: {error}."
            ) from None

    @property
    def pipelines(self) -> list[str]:
        """The pipelines whose states are read, each once."""
        return list(dict.fromkeys(of.partition(".")[0] for of in self.reads))

    @property
    def usage(self) -> str:
        """The arguments as a person types them: ``NAME WORD...``."""
        words = (f"{name.upper()}..." if ColumnType(kind).element else name.upper() for name, kind in self.arguments.items())
        return " ".join((self.name, *words))

    def in_order(self, values: Sequence[str]) -> dict[str, Any]:
        """Return values, given in the arguments' order, by argument; an array takes all values that are left.

        Raises: ValueError if there are too few or too many.
        """
        names = list(self.arguments)
        takes_rest = bool(names) and ColumnType(self.arguments[names[-1]]).element is not None
        single = names[:-1] if takes_rest else names
        if len(values) < len(single) or (len(values) > len(single) and not takes_rest):
            raise ValueError(f"Query {self.name} is asked as: {self.usage}. {len(values)} values are given.")
        by_name: dict[str, Any] = dict(zip(single, values, strict=False))
        return {**by_name, names[-1]: list(values[len(single) :])} if takes_rest else by_name
