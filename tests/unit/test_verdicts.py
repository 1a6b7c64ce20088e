"""The verdicts of the commit, of the start of an attempt and of turns, over all combinations of facts in a small scope."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, cached_property
from itertools import product
from typing import Any
from uuid import UUID

import pytest

from tests import store
from tests.store import NotStarted, PipelineSpec, attempts, batch_turns, begin_attempt, commit_facts, cursors, errors, verdicts
from tidegate.jobs import Count, Files, Pipeline, State

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HISTORY = UUID(int=1)
YES_AND_NO = (True, False)


class Spec(PipelineSpec):
    """What is asked of it again and again is computed once."""

    tables = cached_property(PipelineSpec.tables.fget)


def _spec(**changed: Any) -> Spec:
    source = Files("p", glob="*", format="csv", schema={"k": "string"})
    spec = Pipeline(name="p", source=source, states={"s": State(key={"k": "text"}, aggregates={"n": Count()})}).spec
    return Spec(**{**vars(spec), **changed})


TRANSACTIONAL, OPAQUE = _spec(), _spec(source_kind="opaque")
OPEN = {"sealed_at": None, "failed_at": None, "error": None, "is_poison": None, "quarantined_rows": None}
SEALED = OPEN | {"sealed_at": NOW, "quarantined_rows": 0, "sealed_seconds": 1.0}


def attempt(spec: PipelineSpec, **facts: Any) -> attempts.AttemptRow:
    known = {"owner": "me", "fingerprint": spec.fingerprint, "age_seconds": 1.0, "silent_seconds": 1.0, "sealed_seconds": None}
    return attempts.AttemptRow(**{**OPEN, **known, "has_session": True, **facts})


def attempts_of(spec: PipelineSpec) -> dict[str, attempts.AttemptRow | None]:
    return {
        "none": None,
        "at work": attempt(spec),
        "own": attempt(spec, is_own=True),
        "gone": attempt(spec, has_session=False),
        "silent": attempt(spec, silent_seconds=60.0),
        "late": attempt(spec, age_seconds=100.0),
        "failed": attempt(spec, failed_at=NOW, error="POISON: bad", is_poison=True),
        "sealed": attempt(spec, **SEALED),
        "sealed otherwise": attempt(spec, **SEALED | {"fingerprint": "of another declaration"}),
        "sealed with bad records": attempt(spec, **SEALED | {"quarantined_rows": 1}),
    }


@cache
def digest(txid: int) -> bytes:
    return hashlib.sha256(store.encode_metadata({"number": txid})).digest()


def batch(
    txid: int, newest: attempts.AttemptRow | None, *, given_up: bool = False, halted: bool = False, continues: bool = True
) -> commit_facts.BatchFacts:
    number, skip = int(newest is not None), "why" if given_up else None
    locked = attempts.LockedBatch("p", txid, digest(txid), number, NOW if halted else None, skip, skip, HISTORY)
    previous = (digest(txid - 1) if txid > 1 else None) if continues else b"of another plan"
    row = commit_facts.InputRow(txid, store.encode_metadata({"number": txid}), digest(txid), digest(txid), previous)
    return commit_facts.BatchFacts(locked, row, newest, is_committed=False, sealed_rows=1)


def facts(spec: PipelineSpec, committed: int, *batches: commit_facts.BatchFacts, **changed: Any) -> commit_facts.CommitFacts:
    known = {"last_commit": committed, "window": 16, "paused_at": None, "retired_at": None, "fingerprint": spec.fingerprint}
    known |= {"tables": spec.tables, "strange": None, **changed}
    cursor = cursors.Cursor("p", committed, committed or None, digest(committed) if committed else None, "1/1/1", HISTORY)
    retired = cursors.Retired(known["retired_at"], "me", "why")
    registered = commit_facts.Registered(**{name: known[name] for name in commit_facts.Registered._fields})
    return commit_facts.CommitFacts(cursor, retired, registered, {each.locked.txid: each for each in batches})


STRANGE = commit_facts.StrangeTable("p", "s", 2, False, False, True, None)
REGISTERED: dict[str, tuple[dict[str, Any], type[errors.TidegateError] | None]] = {
    "as declared": ({}, None),
    "otherwise": ({"fingerprint": "another"}, errors.DeclarationChanged),
    "without its state": ({"tables": ()}, errors.DeclarationChanged),
    "with an open table": ({"strange": STRANGE}, errors.GuardMismatch),
}
NOT_SEALED = {**dict.fromkeys(("at work", "own", "gone"), errors.AttemptNotSealed), "sealed": None}


@pytest.mark.promise("I3", "I4", "I6", "I9", "I12", "I16", "I23")
@pytest.mark.parametrize("spec", [TRANSACTIONAL, OPAQUE], ids=["transactional", "opaque"])
def test_a_batch_commits_only_if_no_rule_is_broken(spec: Spec) -> None:
    commits = 0
    for (name, newest), retired, hole, ahead, known, corrupt, given_up, continues, registered in product(
        attempts_of(spec).items(), *[YES_AND_NO] * 7, REGISTERED
    ):
        changed, undeclared = REGISTERED[registered]
        txid = 4 if ahead else 3
        found = batch(txid, newest, given_up=given_up, continues=continues)
        if corrupt:
            found = replace(found, row=found.row._replace(source_metadata=b"{}"))
        shown = facts(spec, 2, *[found] * known, retired_at=NOW if retired else None, last_commit=1 if hole else 2, **changed)
        unlinked = errors.MetadataCorrupt if spec.source_kind == "transactional" else errors.Unprocessed
        broken = [
            errors.PipelineRetired if retired else None,
            errors.HoleDetected if hole else None,
            errors.CommitOutOfOrder if ahead else None,
            None if known else errors.UnknownBatch,
            errors.MetadataCorrupt if corrupt else None,
            None if given_up else NOT_SEALED.get(name, errors.Unprocessed),
            None if continues else unlinked,
            None if given_up else undeclared,
        ]
        first = next((error for error in broken if error), None)
        try:
            decided = verdicts.may_commit(shown, spec, txid, 100)
        except errors.TidegateError as error:
            decided = type(error)
        assert decided is (first or found), (name, broken)
        commits += first is None
    assert commits == 1 + 10 * len(REGISTERED), "one is sealed as it should be; given up, it needs no attempt"


@pytest.mark.promise("I3", "I12", "limit:MAX_ROWS_TOGETHER")
def test_batches_are_merged_together_up_to_the_first_that_is_not_ready() -> None:
    ready = {"newest": attempts_of(OPAQUE)["sealed"]}
    of_kinds = {name: {"newest": newest} for name, newest in attempts_of(OPAQUE).items() if name != "sealed"}
    of_kinds |= {what: ready | {what: what != "continues"} for what in ("halted", "given_up", "continues")}
    kinds = ["ready", "large", *of_kinds]
    most = verdicts.MAX_ROWS_TOGETHER
    for chosen in product(kinds, repeat=3):
        facts_of = [batch(3 + place, **of_kinds.get(kind, ready)) for place, kind in enumerate(chosen)]
        sizes = [most if kind == "large" else 1 for kind in chosen]
        batches = [replace(each, sealed_rows=size) for each, size in zip(facts_of, sizes, strict=True)]
        together = verdicts.ready(facts(OPAQUE, 2, *batches), OPAQUE)
        count = len(together)
        assert together == batches[:count]
        assert set(chosen[:count]) <= {"ready", "large"}
        assert count == 1 or sum(sizes[:count]) <= most
        assert count == 3 or chosen[count] in of_kinds or (together and sum(sizes[: count + 1]) > most)
    first, _, third = (batch(txid, **ready) for txid in (3, 4, 5))
    third = replace(third, row=third.row._replace(previous_digest=digest(3)))
    assert verdicts.ready(facts(OPAQUE, 2, first, third), OPAQUE) == [first], "4, which was not locked, has the metadata of 3"


NEW = {
    "fresh": None,
    "planned again": store.NewInput(store.encode_metadata({"new": 1}), digest(2)),
    "planned too early": store.NewInput(store.encode_metadata({"new": 1}), b"of an earlier plan"),
}
MODES: tuple[store.Mode, ...] = ("resume", "take over", "first", "restage", "redo")


def starts() -> Iterator[tuple[dict[str, Any], Any]]:
    of_specs = product(("transactional", "opaque"), (None, "q"), ((), (store.StateRead("p.s", "previous txid"),)))
    specs = [_spec(source_kind=kind, rebuilds=rebuilds, queries=queries) for kind, rebuilds, queries in of_specs]
    before = batch(2, None)
    for spec, given_up, continues in product(specs, YES_AND_NO, YES_AND_NO):
        for name, newest in attempts_of(spec).items():
            planned = batch(3, newest, given_up=given_up, continues=continues)
            is_kept = spec.source_kind == "transactional" or continues
            is_done = name in ("sealed", "sealed with bad records") and continues
            of_batch = {"spec": spec, "newest": newest, "given_up": given_up, "is_kept": is_kept, "is_done": is_done}
            of_batch["is_in_work"] = name in ("at work", "late")
            for paused, distance in product(YES_AND_NO, (1, 2, 3)):
                shown = facts(spec, 3 - distance, before, planned, window=2, paused_at=NOW if paused else None)
                for mode, look in product(MODES, NEW):
                    request = begin_attempt.Request(3, "me", mode, None, NEW[look])
                    now = {"mode": mode, "look": look, "paused": paused, "distance": distance, "planned": planned.input}
                    yield of_batch | now, begin_attempt.decide(spec, request, shown)


def check_start(now: dict[str, Any], chosen: Any) -> None:
    spec = now["spec"]
    assert chosen.continues == digest(2) or (now["is_kept"] and chosen is now["planned"]), "I12"
    if now["look"] == "fresh":
        assert chosen is now["planned"], "I6"
        assert spec.source_kind == "transactional" or spec.rebuilds or now["newest"] is None, "I12, I24"
    if now["mode"] != "redo":
        assert now["distance"] <= (1 if spec.awaits_previous else 2), "I3, I21"
        assert not (now["paused"] and now["newest"] is None)
        assert not (now["given_up"] and now["is_kept"])
        assert now["mode"] != "first" or now["newest"] is None
        assert now["mode"] == "take over" or not now["is_in_work"], "no other process is fenced at its work"
        assert now["mode"] == "restage" or not now["is_done"], "I8"


REASONS: dict[Any, Callable[[dict[str, Any]], bool]] = {
    NotStarted.GIVEN_UP: lambda now: now["given_up"] and now["is_kept"],
    NotStarted.SEALED: lambda now: now["is_done"],
    NotStarted.BEGUN: lambda now: now["mode"] == "first" and now["newest"] is not None,
    NotStarted.IN_WORK: lambda now: now["is_in_work"],
    NotStarted.PAUSED: lambda now: now["paused"] and now["newest"] is None,
    NotStarted.AHEAD: lambda now: now["distance"] > (1 if now["spec"].awaits_previous else 2),
}


@pytest.mark.promise("I3", "I6", "I8", "I12", "I20", "I21", "I24")
def test_an_attempt_starts_only_where_the_protocol_lets_it_or_has_its_reason() -> None:
    seen, inputs = set(), 0
    for now, chosen in starts():
        if isinstance(chosen, store.BatchInput):
            inputs += 1
            check_start(now, chosen)
        elif isinstance(chosen, NotStarted):
            seen.add(chosen)
            assert now["mode"] != "redo"
            assert REASONS[chosen](now), (chosen, now)
        elif isinstance(chosen, store.ReplanNeeded):
            assert chosen.continues == digest(2)
            chooses = now["spec"].source_kind == "opaque" and now["spec"].rebuilds is None
            is_again = chooses and now["newest"] is not None
            assert now["look"] == "planned too early" or (now["look"] == "fresh" and (is_again or not now["is_kept"])), "I24"
    assert seen == set(NotStarted)
    assert inputs > 1000


@pytest.mark.promise("I3", "I20", "I23")
def test_turns_open_in_order_and_wait_only_for_batches_that_come() -> None:
    waited = {f"sealed {s} s ago": attempt(OPAQUE, **SEALED | {"sealed_seconds": s}) for s in (-1.0, 29.0, 30.0, 200.0)}
    newest_ones, unended_ones = attempts_of(OPAQUE) | waited, ((None, None), (4, 1), (4, 0), (9, 1))
    for name, committed, paused, retired, alone, merge, halted, unended, given_up, awaits in product(
        newest_ones, (1, 2, 3), *[YES_AND_NO] * 3, (None, 10.0), (None, 3, 4), unended_ones, *[YES_AND_NO] * 2
    ):
        newest = newest_ones[name]
        of_pipeline = (committed, 2, NOW if paused else None, NOW if retired else None, alone, OPAQUE.fingerprint, merge)
        of_batch = (halted, "why", *unended, int(newest is not None), "why" if given_up else None)
        now = batch_turns.TurnFacts("p", 3, *of_pipeline, *of_batch, awaits_ack=awaits, newest=newest)
        turn = batch_turns.turn(now)
        is_next, is_committed = committed == 2, committed == 3
        has_ended = newest is not None and (newest.sealed_at or newest.failed_at) is not None
        coming, begun = unended
        others_come = coming is not None and coming - committed <= 2 and not alone and not (paused and not begun)
        since = newest.sealed_seconds if newest and newest.sealed_seconds is not None else -1.0
        waits = others_come and 0 <= since < min(3 * (merge or 0), 180)
        assert turn.opens == (is_committed or (is_next and (given_up or (has_ended and not waits)))), "I3, I20"
        assert turn.begins == (3 - committed <= 2 and not (paused and newest is None)), "I3"
        assert (turn.halted is not None) == ((retired and not is_committed) or halted == 3), "I20, I23"
        assert turn.done == (is_committed and not awaits)
        is_sealed = newest is not None and newest.sealed_at is not None and name != "sealed otherwise"
        assert now.is_over == (is_committed or given_up or is_sealed)
        assert now._replace(continues=b"another input").is_over == is_committed
        assert now.is_in_work == (name in ("at work", "own", "late"))
