"""Hash partitions: the table of a state with many keys, split into smaller ones by a hash of the key.

A commit writes them through the table of the state's name, and Postgres divides the rows, so only the creation of the table
depends on them. All rows of a key are in one partition: of a state with windows every window, of a history every version.
Partitions are vacuumed and reindexed one by one. Their names have a $, which no declared name has.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy.dialects import postgresql

from tidegate.state_store.base.errors import SchemaOutOfDate
from tidegate.state_store.declarations.pipeline_spec import StateSpec


def partitioned_by(state: StateSpec) -> str:
    """Return the SQL of what the table is partitioned by."""
    quote = postgresql.dialect().identifier_preparer.quote  # type: ignore[no-untyped-call]
    return f"HASH ({', '.join(quote(key.name) for key in state.hashed_keys)})"


def made(schema: str | None, state: StateSpec, storage: dict[str, Any], after: Sequence[str]) -> Iterator[str]:
    """Yield the statements that create each partition of a table, followed by those of `after`, with its name in them."""
    options = ", ".join(f"{name} = {value}" for name, value in storage.items())
    for number, name in enumerate(names(state)):
        table = f"{schema}.{name}"
        yield (
            f"CREATE TABLE {table} PARTITION OF {schema}.{state.table_name} "
            f"FOR VALUES WITH (MODULUS {state.hash_partitions}, REMAINDER {number}) WITH ({options})"
        )
        yield from (statement.format(table=table) for statement in after)


def why_not_whole(table: str, moduli: Sequence[int]) -> SchemaOutOfDate | None:
    """Return the error for a table with these moduli, one per partition; None if it has all partitions."""
    if set(moduli) == {len(moduli)}:
        return None
    divided = f"{len(moduli)} of {max(moduli)}" if moduli else "none"
    return SchemaOutOfDate(
        f"Table {table} is not divided as its migration made it: of its hash partitions, it has {divided}. What was "
        "detached is missing with all its keys: attach it again with its former modulus and remainder "
        f"(ALTER TABLE {table} ATTACH PARTITION ...; if its detaching was broken off, end that first: DETACH PARTITION ... "
        "FINALIZE), then run: tidegate migrate. Nothing was changed."
    )


def names(state: StateSpec) -> list[str]:
    """Return the names of a state's partitions; none without."""
    return [f"{state.table_name}${number}" for number in range(state.hash_partitions)] if state.hash_partitions > 1 else []
