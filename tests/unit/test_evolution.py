"""Which columns of a state that has rows may come and go, and what the refusal of every other change says."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.store import PipelineSpec, declaration_changes
from tidegate.jobs import Avg, Count, Files, History, Last, Newest, Pipeline, Ranges, Rows, State, Sum, Tumbling
from tidegate.jobs.states import AnyState
from tidegate.state_store.base.errors import DeclarationChanged

LOG = Rows({"name": "text", "amount": "integer"})
NEWEST = Newest({"name": "text"}, {"amount": "integer", "city": "text"}, {"at": "timestamptz"})
HISTORY = History({"name": "text"}, {"amount": "integer", "city": "text"}, {"at": "timestamptz"}, deleted="gone")
STATE = State(key={"name": "text"}, aggregates={"lines": Count(), "amount": Sum("amount"), "mean": Avg("amount")})


def spec(states: Sequence[AnyState], version: int = 2) -> PipelineSpec:
    source = Files("inbox", format="csv", schema={"name": "string", "amount": "int"})
    return Pipeline("inbox", source, {f"s{number}": state for number, state in enumerate(states, 1)}, version=version).spec


def known(states: Sequence[AnyState]) -> dict[str, Any]:
    """Return a declaration as the ledger has it: jsonb keeps no order of names."""
    return json.loads(json.dumps({**spec(states).declaration, "version": 1}, sort_keys=True))


def check(before: Sequence[AnyState], after: Sequence[AnyState], version: int = 2) -> list[str]:
    """Return what is said of a change, if it is not refused."""
    changes = declaration_changes.check(known(before), spec(after, version), 3)
    assert changes == declaration_changes.column_changes(known(before), spec(after))
    return list(map(str, changes))


def columns(state: Any, **changes: str | None) -> Any:
    """Return a state with other columns: None takes one out, a type adds one at the end."""
    kept = {name: kind for name, kind in state.columns.items() if name not in changes}
    return replace(state, columns={**kept, **{name: kind for name, kind in changes.items() if kind}})


COMES = "State s1 of pipeline inbox gets more: NULL in all rows that committed before."
GOES = "State s1 of pipeline inbox loses amount: the values are gone then, and no migration brings them back."


@pytest.mark.promise("decision:0051")
@pytest.mark.parametrize("state", [LOG, NEWEST, HISTORY, replace(NEWEST, kind="opaque", changes=True)])
def test_columns_come_and_go_if_the_version_confirms_that(state: Any) -> None:
    def said(after: Any, version: int = 2) -> list[str]:
        return check([state, STATE], [after, STATE], version)

    assert said(state) == []
    assert said(columns(state, more="text")) == [COMES]
    assert said(columns(state, amount=None)) == [GOES]
    both = [f"{COMES} {GOES} Nothing is renamed: no values move from one to the other."]
    assert said(columns(state, amount=None, more="integer")) == both
    with pytest.raises(DeclarationChanged, match=rf"^{re.escape(COMES)} If that is meant .* raise .* version above 1\.$"):
        said(columns(state, more="text"), version=1)


def paid_as(kind: str) -> State:
    return State({"name": "numeric(10,2)"}, {"paid": Sum("amount", kind), "mean": Avg("amount", scale=2)})


PRICES, WIDER = paid_as("numeric(10,2)"), paid_as("numeric(14,2)")


def test_a_numeric_value_may_get_more_digits_before_the_point() -> None:
    log = Rows({"name": "text", "amount": "numeric(10,2)"})
    wide = "State s{} of pipeline inbox has {} as numeric(14,2): the values stay as they are."
    assert check([log, PRICES], [columns(log, amount=None, more="text"), WIDER])[1:] == [wide.format(2, "paid")]
    wider_log = replace(log, columns={**log.columns, "amount": "numeric(14,2)"})
    assert check([log], [wider_log]) == [wide.format(1, "amount")]
    with pytest.raises(DeclarationChanged, match=r"raise the pipeline's version above 1"):
        check([PRICES], [WIDER], version=1)
    for refused in (replace(PRICES, key={"name": "numeric(14,2)"}), paid_as("numeric(9,2)"), paid_as("numeric(14,3)")):
        with pytest.raises(DeclarationChanged, match="has committed 3 batches into other states"):
            check([PRICES], [refused])


DATED = Rows({"name": "text", "amount": "integer", "at": "date"}, range_partitions=Ranges("at", "day"))
NEW = "is new, and would lack the earlier batches for keys that have rows already"


def aggregates(**changes: Any) -> State:
    return replace(STATE, aggregates={**STATE.aggregates, **changes})


def last(**order: str) -> State:
    return State({"name": "text"}, {"last": Last("amount", "integer", order)})


TWO_NEW = f"state s1: most, count(amount), {NEW}; state s1: least, sum(city), {NEW}."
AS_NUMERIC = "amount was sum(amount) as bigint, merged as sum, and is sum(amount) as numeric(20,2), merged as sum: what is kept"
REFUSALS: list[tuple[list[AnyState], list[AnyState], str]] = [
    ([LOG], [columns(LOG, amount="bigint")], "column amount was integer, and is bigint, for which Postgres would write"),
    ([LOG], [DATED], "state s1: at divides it by ranges and may not be NULL, which it would be in all rows that committed"),
    ([NEWEST], [replace(NEWEST, order_by={"seq": "bigint"})], "column at is gone, by which it was decided which row is the"),
    ([NEWEST], [HISTORY], "state s1: "),
    ([HISTORY], [replace(HISTORY, deleted=None)], "what its versions are ordered and ended by is declared otherwise"),
    ([STATE], [aggregates(most=Count("amount"), least=Sum("city"))], TWO_NEW),
    ([STATE], [aggregates(amount=Sum("amount", "numeric(20,2)"))], AS_NUMERIC),
    ([STATE], [replace(STATE, window=Tumbling("at", "1 hour"))], "state s1: window_end, "),
    ([last(at="date", seq="bigint")], [last(at="date")], "last_seq, last(seq), is gone; aggregates are not taken out in place"),
    ([LOG], [columns(LOG, more="text"), STATE], "state s2 is new, and would lack the earlier batches. "),
]


@pytest.mark.parametrize(("before", "after", "message"), REFUSALS)
def test_every_other_change_is_refused_with_its_reason(before: list[AnyState], after: list[AnyState], message: str) -> None:
    with pytest.raises(DeclarationChanged) as refusal:
        check(before, after)
    assert str(refusal.value).startswith("inbox has committed 3 batches into other states than these: ")
    assert message in str(refusal.value)
    assert "give the pipeline and its states new names. Or take the change back" in str(refusal.value)
    assert declaration_changes.column_changes(known(before), spec(after)) == []
