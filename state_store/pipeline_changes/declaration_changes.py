"""Columns of states come and go once batches have committed: which changes are made in place, why others are refused.

Appended rows, newest rows and versions are kept as they came. So a value column may be added, which is NULL in the rows of
earlier batches, or dropped with its values. What is computed of all rows may not: an aggregate that is added would lack the
earlier batches for the keys that have rows already. A numeric may get more digits before the point, in every kind of state.
Any other type is refused, as Postgres would write the whole table again under a lock, and followers have read the former type.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from tidegate.state_store.base.errors import DeclarationChanged
from tidegate.state_store.declarations.column_spec import ColumnType
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec
from tidegate.state_store.ledger import tables
from tidegate.state_store.ledger.followers import followers

# What may change beside the states: `registration` checks the first two, and the last reads what is there.
_ELSEWHERE = {"version", "source_identity", "queries"}
_FIELDS = {
    "keys": "its key",
    "kind": "its kind",
    "derived": "how its values are derived",
    "appends": "whether it appends rows",
    "changes": "whether it records changes",
    "updates": "whether it is an update",
    "history": "what its versions are ordered and ended by",
    "window": "its window",
}
_State = Mapping[str, Any]


MOST_SHOWN = 3  # differences of a source that a message names


def source_difference(before: str, now: str) -> str:
    """Return what differs between the identities of two sources: columns and other parts that one has and the other has not."""
    parts = [_parts_of(identity) for identity in (before, now)]
    if not all(parts):
        return f"it was {before}"
    gone, come = (sorted(one - other) for one, other in (parts, reversed(parts)))
    found = [f"{what} {text}" for what, texts in (("it no longer has", gone), ("it now has", come)) for text in texts]
    more = f", and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
    return ", ".join(found[:MOST_SHOWN]) + more


def _parts_of(identity: str) -> set[str]:
    """Return the parts of a source's identity, a kind and JSON, as texts; none if it is of another form."""
    begin = min((identity.find(sign) for sign in "[{" if sign in identity), default=len(identity))
    try:
        found = json.loads(identity[begin:])
    except ValueError:
        return set()
    parts = found.items() if isinstance(found, dict) else (("", each) for each in found)
    return {identity[:begin].strip()}.union(*(_texts_of(name, value) for name, value in parts))


def _texts_of(name: str, value: Any) -> set[str]:
    """Return a part of an identity as texts: each column and each option is one."""
    if isinstance(value, dict):
        return {f"{option}={json.dumps(of)}" for option, of in value.items()}
    if isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return {f"column {column} {json.dumps(of)}" for column, of in value}
    return {f"{name} {json.dumps(value)}".strip()}


class ColumnChange(NamedTuple):
    """The value columns that a state gets, loses and widens; an update has no table, and only its code gets others."""

    pipeline: str
    state: str
    added: tuple[str, ...]
    dropped: tuple[str, ...]
    widened: dict[str, str]
    is_update: bool

    def __str__(self) -> str:
        begin, parts = f"{'Update' if self.is_update else 'State'} {self.state} of pipeline {self.pipeline}", []
        if self.added:
            rows = " from the next batch on" if self.is_update else ": NULL in all rows that committed before"
            parts.append(f"{begin} gets {' and '.join(self.added)}{rows}.")
        if self.dropped:
            rows = (
                " from the next batch on" if self.is_update else ": the values are gone then, and no migration brings them back"
            )
            parts.append(f"{begin} loses {' and '.join(self.dropped)}{rows}.")
        parts += [f"{begin} has {name} as {wide}: the values stay as they are." for name, wide in self.widened.items()]
        if self.added and self.dropped and not self.is_update:
            parts.append("Nothing is renamed: no values move from one to the other.")
        return " ".join(parts)


def changed_fields(known: _State, spec: PipelineSpec) -> set[str]:
    """Return what of a registered declaration has changed."""
    declaration = _plain(spec)
    return {name for name in known.keys() | declaration.keys() if declaration.get(name) != known.get(name)}


def column_changes(known: _State, spec: PipelineSpec) -> list[ColumnChange]:
    """Return which columns the states get and lose, if nothing else of the states changes; else nothing."""
    changes, refusals = _compare(known, spec)
    return [] if refusals else changes


def check(known: _State, spec: PipelineSpec, committed: int) -> list[ColumnChange]:
    """Refuse a change of the states that `committed` batches have gone into, unless it is one of columns, which is returned.

    It has to be confirmed by a higher version of the pipeline, as a change of the source is.

    Raises: DeclarationChanged.
    """
    changes, refusals = _compare(known, spec)
    if refusals:
        batches = "a batch" if committed == 1 else f"{committed} batches"
        raise DeclarationChanged(
            f"{spec.name} has committed {batches} into other states than these: {'; '.join(refusals)}. Let them be "
            f"computed again: raise its version, and run: tidegate rebuild {spec.name} --yes. Or give the pipeline and its "
            "states new names. Or take the change back, with the migration that was written for it."
        )
    if changes and spec.version <= known["version"]:
        raise DeclarationChanged(
            f"{' '.join(map(str, changes))} If that is meant for the batches to come, raise the pipeline's version above "
            f"{known['version']}."
        )
    return changes


def check_followers(connection: Connection, spec: PipelineSpec, changes: Sequence[ColumnChange]) -> None:
    """Refuse to drop or widen a column while a follower has batches that were planned with it: attempts have to read the same.

    One that is planned meanwhile reads only after the migration, whose lock on the table it waits for.

    Raises: DeclarationChanged.
    """
    b = tables.batch.c
    for change in (change for change in changes if (change.dropped or change.widened) and not change.is_update):
        for follower in followers(connection, spec.name, change.state):
            open_batches = sa.select(sa.func.min(b.txid), sa.func.max(b.txid)).where(
                b.pipeline == follower.pipeline, b.txid > follower.committed
            )
            first, last = connection.execute(open_batches).one()
            if first is not None:
                raise DeclarationChanged(
                    f"State {change.state} of pipeline {spec.name} cannot lose or widen "
                    f"{' and '.join([*change.dropped, *change.widened])} yet: pipeline {follower.pipeline} follows it, and has "
                    f"planned txids {first} to {last} with that, which have not committed. Let them commit, then repeat the "
                    "command."
                )


def _plain(spec: PipelineSpec) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(spec.declaration))
    return plain


def _compare(known: _State, spec: PipelineSpec) -> tuple[list[ColumnChange], list[str]]:
    """Return the changes of columns that may be made in place, and why the others may not."""
    declaration = _plain(spec)
    fields = changed_fields(known, spec) - _ELSEWHERE - {"states"}
    refusals = [f"its {name} was {known.get(name)}, and is {declaration.get(name)}" for name in sorted(fields)]
    before, after = ({state["name"]: state for state in each["states"]} for each in (known, declaration))
    refusals += [f"state {name} is new, and would lack the earlier batches" for name in after if name not in before]
    refusals += [f"state {name} is gone" for name in before if name not in after]
    if not refusals and list(before) != list(after):
        refusals.append("its states are in another order")
    changes = []
    for name in (name for name in after if name in before):
        widened = _widened(before[name], after[name])
        same = [{**each, "type": {"name": widened.get(each["name"], each["type"]["name"])}} for each in before[name]["values"]]
        refusals += [f"state {name}: {why}" for why in _refusals({**before[name], "values": same}, after[name], spec)]
        gone, new = _names(before[name]), _names(after[name])
        added, dropped = (tuple(each for each in one if each not in other) for one, other in ((new, gone), (gone, new)))
        if added or dropped or widened:
            changes.append(ColumnChange(spec.name, name, added, dropped, widened, after[name]["updates"]))
    return changes, refusals


def _widened(before: _State, after: _State) -> dict[str, str]:
    """Return the values' types that are wider now, of the same scale, so that no row is written again; by column."""
    was, now = ({value["name"]: value["type"]["name"] for value in state["values"]} for state in (before, after))
    return {
        name: now[name]
        for name in was
        if name in now
        and (old := ColumnType(was[name]).precision_and_scale)
        and (new := ColumnType(now[name]).precision_and_scale)
        and old[0] < new[0]
        and old[1] == new[1]
    }


def _refusals(before: _State, after: _State, spec: PipelineSpec) -> Iterator[str]:
    fields = [name for name in {**_FIELDS, **before, **after} if before.get(name) != after.get(name)]
    if "values" in fields:
        as_they_came = _keeps_rows_as_they_came(before) and _keeps_rows_as_they_came(after)
        yield from _of_columns(before, after, spec) if as_they_came else _of_aggregates(before, after)
    others = [_FIELDS.get(name, name) for name in fields if name != "values"]
    if others and set(fields) != {"values", "derived"}:
        yield f"{' and '.join(others)} {'is' if len(others) == 1 else 'are'} declared otherwise"


def _keeps_rows_as_they_came(state: _State) -> bool:
    """Return whether a state's values are those of one row: an appended one, a version, or the newest one of its key.

    The values of an aggregate `Last` are, too, but have other names than the columns of that row.
    """
    names = _names(state)
    is_newest = all((each["computed"], each["order"]) == (f"last({each['name']})", names) for each in state["values"])
    return bool(state["appends"]) or (is_newest and bool(state["keys"]))


def _of_columns(before: _State, after: _State, spec: PipelineSpec) -> Iterator[str]:
    was, now = ({value["name"]: value for value in state["values"]} for state in (before, after))
    kept, added = [name for name in was if name in now], [name for name in now if name not in was]
    for name in kept:
        if was[name]["type"] != now[name]["type"]:
            yield (
                f"column {name} was {was[name]['type']['name']}, and is {now[name]['type']['name']}, for which Postgres would "
                "write the whole table again, and which followers do not expect; add one of another name with that type instead"
            )
        elif {**was[name], "order": None} != {**now[name], "order": None}:
            yield f"column {name} was {was[name]['computed']}, and is {now[name]['computed']}"
    declared = spec.state(after["name"])
    if declared is not None and (divides := [name for name in added if name in declared.required]):
        yield f"{divides[0]} divides it by ranges and may not be NULL, which it would be in all rows that committed before"
    if after["appends"]:
        return
    if list(now) != [*kept, *added]:
        yield "the order of its columns, which decides which of two rows is kept, is another one; declare new ones last"
    if not after["history"] and next(iter(was)) not in now:
        yield f"column {next(iter(was))} is gone, by which it was decided which row is the newest"


def _of_aggregates(before: _State, after: _State) -> Iterator[str]:
    was, now = ({value["name"]: value for value in state["values"]} for state in (before, after))
    for name, value in now.items():
        if name not in was:
            yield f"{name}, {value['computed']}, is new, and would lack the earlier batches for keys that have rows already"
        elif value != was[name]:
            yield f"{name} was {_described(was[name])}, and is {_described(value)}: what is kept would mean something else"
    for name in (name for name in was if name not in now):
        yield f"{name}, {was[name]['computed']}, is gone; aggregates are not taken out in place"
    if was == now:
        yield "its aggregates are in another order"


def _described(value: _State) -> str:
    return f"{value['computed']} as {value['type']['name']}, merged as {value['merge']}"


def _names(state: _State) -> list[str]:
    return [value["name"] for value in state["values"]]
