"""Which columns of a state that has rows may come and go, and what the refusal of every other change says."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.store import declaration_changes
from tidegate.jobs import Avg, Count, Files, History, Last, Newest, Pipeline, Ranges, Rows, State, Sum, Tumbling
from tidegate.jobs.states import AnyState
from tidegate.state_store.base.errors import DeclarationChanged

SOURCE = Files("inbox", format="csv", schema={"name": "string", "amount": "int"})
LOG = Rows({"name": "text", "amount": "integer"})
NEWEST = Newest(key={"name": "text"}, columns={"amount": "integer", "city": "text"}, order_by={"at": "timestamptz"})
HISTORY = History(
    key={"name": "text"}, columns={"amount": "integer", "city": "text"}, order_by={"at": "timestamptz"}, deleted="gone"
)
STATE = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount"), "mean": Avg("amount")})


def pipeline(*states: AnyState, version: int = 2, **changes: Any) -> Pipeline:
    named = {f"s{number}": state for number, state in enumerate(states, start=1)}
    return Pipeline(**{"name": "inbox", "source": SOURCE, "states": named, "version": version} | changes)


def known(declared: Pipeline) -> dict[str, Any]:
    """Return a declaration as the ledger has it: jsonb keeps no order of names."""
    return json.loads(json.dumps({**declared.spec.declaration, "version": 1}, sort_keys=True))


def check(before: Pipeline, after: Pipeline, committed: int = 3) -> list[str]:
    """Return what is said of a change, if it is not refused."""
    changes = declaration_changes.check(known(before), after.spec, committed)
    assert changes == declaration_changes.column_changes(known(before), after.spec)
    return list(map(str, changes))


def columns(state: Any, **changes: str | None) -> Any:
    """Return a state with other columns: None takes one out, a type adds one at the end."""
    kept = {name: kind for name, kind in state.columns.items() if name not in changes}
    return replace(state, columns={**kept, **{name: kind for name, kind in changes.items() if kind}})


COMES = "State s1 of pipeline inbox gets more: NULL in all rows that committed before."
GOES = "State s1 of pipeline inbox loses amount: the values are gone then, and no migration brings them back."


@pytest.mark.parametrize("state", [LOG, NEWEST, HISTORY, replace(NEWEST, kind="opaque", changes=True)])
def test_columns_come_and_go(state: Any) -> None:
    before = pipeline(state, STATE)
    assert check(before, pipeline(state, STATE)) == []
    assert check(before, pipeline(columns(state, more="text"), STATE)) == [COMES]
    assert check(before, pipeline(columns(state, amount=None), STATE)) == [GOES]
    assert check(before, pipeline(columns(state, amount=None, more="integer"), STATE)) == [
        f"{COMES} {GOES} Nothing is renamed: no values move from one to the other."
    ]


PRICES = State({"name": "numeric(10,2)"}, {"paid": Sum("amount", "numeric(10,2)"), "mean": Avg("amount", scale=2)})
WIDER = replace(PRICES, aggregates={**PRICES.aggregates, "paid": Sum("amount", "numeric(14,2)")})


def test_a_numeric_value_may_get_more_digits_before_the_point() -> None:
    log = Rows({"name": "text", "amount": "numeric(10,2)"})
    wide = "has {} as numeric(14,2): the values stay as they are."
    assert check(pipeline(log, PRICES), pipeline(columns(log, amount=None, more="text"), WIDER))[1:] == [
        f"State s2 of pipeline inbox {wide.format('paid')}"
    ]
    assert check(pipeline(log), pipeline(replace(log, columns={**log.columns, "amount": "numeric(14,2)"}))) == [
        f"State s1 of pipeline inbox {wide.format('amount')}"
    ]
    with pytest.raises(DeclarationChanged, match=r"raise the pipeline's version above 1"):
        check(pipeline(PRICES), pipeline(WIDER, version=1))
    for refused in (
        replace(PRICES, key={"name": "numeric(14,2)"}),
        *(replace(PRICES, aggregates={**PRICES.aggregates, "paid": Sum("amount", f"numeric({n})")}) for n in ("9,2", "14,3")),
    ):
        with pytest.raises(DeclarationChanged, match="has committed 3 batches into other states"):
            check(pipeline(PRICES), pipeline(refused))


@pytest.mark.promise("decision:0051")
def test_the_change_is_confirmed_by_the_version() -> None:
    with pytest.raises(DeclarationChanged, match=rf"^{re.escape(COMES)} If that is meant .* raise .* version above 1\.$"):
        check(pipeline(LOG), pipeline(columns(LOG, more="text"), version=1))


ELSE = "give the pipeline and its states new names. Or take the change back"
LAST = Last("amount", "integer", {"at": "date"})
DATED = Rows({"name": "text", "amount": "integer", "at": "date"}, range_partitions=Ranges("at", "day"))
NEW = "is new, and would lack the earlier batches for keys that have rows already"


def aggregates(**changes: Any) -> State:
    return replace(STATE, aggregates={**STATE.aggregates, **changes})


REFUSALS: list[tuple[list[AnyState], list[AnyState], str]] = [
    (
        [LOG],
        [columns(LOG, amount="bigint")],
        "state s1: column amount was integer, and is bigint, for which Postgres would write",
    ),
    ([LOG], [DATED], "state s1: at divides it by ranges and may not be NULL, which it would be in all rows that committed"),
    (
        [NEWEST],
        [replace(NEWEST, order_by={"seq": "bigint"})],
        "column at is gone, by which it was decided which row is the newest",
    ),
    ([NEWEST], [HISTORY], "state s1: "),
    ([HISTORY], [replace(HISTORY, deleted=None)], "what its versions are ordered and ended by is declared otherwise"),
    (
        [STATE],
        [aggregates(most=Count("amount"), least=Sum("city"))],
        f"state s1: most, count(amount), {NEW}; state s1: least, sum(city), {NEW}.",
    ),
    (
        [STATE],
        [aggregates(amount=Sum("amount", "numeric(20,2)"))],
        "amount was sum(amount) as bigint, merged as sum, and is sum(amount) as numeric(20,2), merged as sum: what is kept",
    ),
    ([STATE], [replace(STATE, window=Tumbling("at", "1 hour"))], "state s1: window_end, "),
    (
        [State({"name": "text"}, {"last": Last("amount", "integer", {"at": "date", "seq": "bigint"})})],
        [State({"name": "text"}, {"last": LAST})],
        "last_seq, last(seq), is gone; aggregates are not taken out in place",
    ),
    ([LOG], [columns(LOG, more="text"), STATE], "state s2 is new, and would lack the earlier batches. "),
]


@pytest.mark.parametrize(("before", "after", "message"), REFUSALS)
def test_every_other_change_is_refused_with_its_reason(before: list[AnyState], after: list[AnyState], message: str) -> None:
    with pytest.raises(DeclarationChanged) as refusal:
        check(pipeline(*before), pipeline(*after))
    assert str(refusal.value).startswith("inbox has committed 3 batches into other states than these: ")
    assert message in str(refusal.value)
    assert ELSE in str(refusal.value)
    assert declaration_changes.column_changes(known(pipeline(*before)), pipeline(*after).spec) == []
