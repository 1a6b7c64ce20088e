"""Batches are opened once, and the newest attempt owns a batch: nothing that older attempts do counts."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import psycopg2
import pytest

from tests.integration.conftest import Execute, Tally, contents, frozen, refused, until
from tests.store import MAX_METADATA_BYTES, MAX_TXID, STAGING_DROPS_PER_PLAN, BatchInput, NotStarted, Tracked, registration
from tidegate import migrations
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import (
    AttemptFenced,
    DeclarationChanged,
    HoleDetected,
    MetadataCorrupt,
    RangeRefused,
    SchemaOutOfDate,
    UnknownBatch,
    Unprocessed,
)

# plan


def test_a_plan_continues_what_was_opened_and_is_made_once(tally: Tally, settings: Settings) -> None:
    """A run gets its first answer again, whatever the source holds by now; a planner with a stale view has to look again."""
    store = tally.store
    assert tally.plan(2, run_id="monday") == [1, 2]
    before = contents(settings)
    assert store.open_batches(tally.spec, "monday", [], seen_batch(2), frozen(3, 4)) == [1, 2]
    assert store.open_batches(tally.spec, "monday", [], None, []) == [1, 2]
    assert store.run_txids("tally", "monday") == [1, 2]
    assert store.open_batches(tally.spec, "stale", [], None, frozen(1, 2, 3)) is None
    with pytest.raises(RangeRefused, match="tally has no txid 7 for others to follow: that would leave a gap"):
        store.open_batches(tally.spec, "next", [], seen_batch(7), frozen(8))
    assert contents(settings) == before

    assert store.open_batches(tally.spec, "stale", [], *_look(tally)) == [3]
    assert store.uncommitted("tally", 10) == [1, 2, 3]
    assert store.open_batches(tally.spec, "next", [1, 2, 3], seen_batch(3), frozen(4)) == [1, 2, 3, 4]


@pytest.mark.promise("limit:MAX_METADATA_BYTES")
def test_what_opens_no_batch_writes_at_most_that_a_plan_succeeded(tally: Tally, settings: Settings, store: StateStore) -> None:
    """A plan beyond a limit is refused as a whole; one may find nothing to do any number of times."""
    before = contents(settings)
    with pytest.raises(RangeRefused, match="tally has used up its txids"):
        tally.store.open_batches(tally.spec, "run", [], seen_batch(MAX_TXID), frozen(1))
    with pytest.raises(RangeRefused, match=f"takes {MAX_METADATA_BYTES + 1} bytes, the limit is {MAX_METADATA_BYTES}"):
        tally.store.open_batches(tally.spec, "run", [], None, [*frozen(1), bytes(MAX_METADATA_BYTES + 1)])
    with pytest.raises(UnknownBatch, match="tally has no txid 1"):
        tally.start(1)
    with pytest.raises(SchemaOutOfDate, match="Run: tidegate migrate"):
        tally.store.committed("unknown")
    assert contents(settings) == before

    assert tally.store.open_batches(tally.spec, "run", [], None, []) == []
    after = contents(settings)
    plans, earlier = after.pop("tidegate.plan"), before.pop("tidegate.plan")
    assert after == before
    assert (len(plans), plans != earlier) == (len(earlier), True)


def test_a_plan_that_runs_twice_at_once_is_one_plan(tally: Tally, settings: Settings, waiting: Callable[[], int]) -> None:
    """The slower execution finds the plan of the faster; neither fails (row 13)."""
    tally.plan(2, run_id="before")
    with closing(psycopg2.connect(**settings.conninfo())) as twin, twin.cursor() as cursor, ThreadPoolExecutor(1) as thread:
        cursor.execute("INSERT INTO tidegate.run_batch (pipeline, run_id, position, txid) VALUES ('tally', 'run', 0, 1)")
        slower = thread.submit(tally.store.open_batches, tally.spec, "run", [1, 2], seen_batch(2), [])
        until(waiting)
        twin.commit()
        assert slower.result() is None, "it had seen one more batch"
    assert tally.store.open_batches(tally.spec, "run", [1, 2], seen_batch(2), []) == [1]


# metadata


FROZEN = frozen(1)[0]
CORRUPTIONS = {
    "bit flip": (FROZEN.replace(b"1", b"0", 1), FROZEN),
    "truncated": (FROZEN[:-1], FROZEN),
    "zero bytes": (b"", FROZEN),
    "trailing garbage": (FROZEN + b" ", FROZEN),
    "another digest": (FROZEN, b"other"),
    "future version": (b'{"metadata":{},"version":2}', None),
    "no version": (b'{"metadata":{}}', None),
    "no metadata": (b'{"version":1}', None),
    "not an object": (b"[1]", None),
    "not JSON": (b'{"version":1', None),
    "nothing at all": (b"", None),
    "not UTF-8": (b'{"version":1,"metadata":{"a":"\xff"}}', None),
    "what no attempt has read": (frozen(2)[0], None),
}


@pytest.mark.promise(
    "I19", "fault:metadata-is-damaged:processing", "fault:metadata-is-damaged:commit", "error:METADATA_CORRUPT"
)
def test_altered_metadata_halts_every_step_of_its_batch(tally: Tally, settings: Settings, as_role: Execute) -> None:
    """Metadata with another digest or an unknown version is never guessed at: no plan, attempt or commit (I19)."""
    tally.plan(1)
    for content in (b'{"metadata":{},"version":2}', b'{"metadata":{}}'):  # the digest is right; no attempt has read anything
        _alter_metadata(as_role, content, content)
        with pytest.raises(MetadataCorrupt, match=r"tally 1: the saved source metadata has version .*, this code reads 1"):
            tally.start(1)
    _alter_metadata(as_role, FROZEN, FROZEN)
    tally.process(1, [("a", 1, 1, 1, 1)])
    steps: list[Callable[[], object]] = [
        lambda: tally.store.last_opened("tally"),
        lambda: tally.store.start_attempt(tally.spec, 1, "test", mode="restage"),
        lambda: tally.commit(1),
        lambda: tally.store.batch_history("tally", 1),
    ]
    refusal = r"tally 1: the saved source metadata .* Restore tidegate\.batch from a backup\."
    for content, digest_of in CORRUPTIONS.values():
        _alter_metadata(as_role, content, content if digest_of is None else digest_of)
        before = contents(settings)
        for step in steps:
            with pytest.raises(MetadataCorrupt, match=refusal):
                step()
        assert contents(settings) == before


def _alter_metadata(as_role: Execute, content: bytes, digest_of: bytes) -> None:
    digest = hashlib.sha256(digest_of).digest()
    as_role("tidegate_owner", "UPDATE tidegate.batch SET source_metadata = %s, source_digest = %s", [content, digest])


# attempts and fences


@pytest.mark.promise(
    "I4", "error:ATTEMPT_FENCED", "I5", "fault:process-is-stopped-and-goes-on-later:processing", "decision:0002"
)
def test_a_newer_attempt_fences_the_older_whenever_that_goes_on(tally: Tally, settings: Settings) -> None:
    """Its seal names the owner of the batch, its failure disturbs nothing, and its rows are never merged (I4, I5)."""
    tally.plan(2)
    beside = tally.start(2)
    older, newer = tally.start(1), tally.start(1)
    assert (older.number, newer.number) == (1, 2)

    def zombie_stages() -> None:
        staged = tally.stage(older, "per_shop", [("a", 9, 9, 9, 9), ("zombie", 9, 9, 9, 9)])
        assert staged.rows == 2
        with refused(settings, AttemptFenced, "tally 1:1 is fenced: attempt 2 owns the batch now"):
            tally.store.seal(older, [staged], Tracked(9))

    zombie_stages()
    tally.store.seal(beside, [], Tracked(0))  # at another batch, which has a fence of its own
    tally.store.seal(newer, [tally.stage(newer, "per_shop", [("a", 1, 1, 1, 1)])], Tracked(1))
    with pytest.raises(AttemptFenced):
        tally.store.fail_attempt(older, "SPARK_UNAVAILABLE: gone")
    tally.store.fail_attempt(newer, "too late: it is sealed")
    errors = [row["error"] for row in tally.store.batch_history("tally", 1).attempts]
    assert errors == ["ATTEMPT_FENCED: attempt 2 took over.", None]
    zombie_stages()
    assert tally.commit(1).attempt == 2
    zombie_stages()
    assert tally.state() == [("a", 1, 1, 1, 1, 1)]
    assert tally.commit(1).attempt == 2


@pytest.mark.promise("I4")
def test_an_attempt_from_before_an_accepted_loss_is_fenced(tally: Tally, settings: Settings, as_role: Execute) -> None:
    tally.plan(1)
    attempt = tally.start(1)
    staged = tally.stage(attempt, "per_shop", [("a", 1, 1, 1, 1)])
    as_role("tidegate_owner", "UPDATE tidegate.cursor SET epoch = '7000000000000000000/00000001'")
    assert migrations.accept_epoch(settings, "an operator")
    steps: list[Callable[[], object]] = [
        lambda: tally.store.seal(attempt, [staged], Tracked(1)),
        lambda: tally.store.fail_attempt(attempt, "SPARK_UNAVAILABLE: gone"),
    ]
    for step in steps:
        with pytest.raises(AttemptFenced, match="has begun another history"):
            step()
    assert tally.process(1, [("a", 2, 2, 2, 2)]).number == 2
    assert tally.commit(1).attempt == 2


@pytest.mark.promise("fault:process-dies-at-any-statement:processing")
def test_a_retry_keeps_what_was_sealed_and_begins_anew_after_all_else(tally: Tally, settings: Settings) -> None:
    """A repeated task finds its work done."""
    tally.plan(2)
    dying = tally.start(1)
    with closing(psycopg2.connect(**settings.conninfo(user="tidegate_stager"))) as connection, connection.cursor() as cursor:
        cursor.execute("INSERT INTO staging.per_shop_1_1 VALUES ('lost', 1, 1, 1, 1, 1)")
    sealed = tally.process(1, [("a", 1, 1, 1, 1)])
    before = contents(settings)
    assert tally.store.start_attempt(tally.spec, 1, "again") is NotStarted.SEALED
    tally.store.seal(sealed, [], Tracked(99))  # its first answer was lost
    assert contents(settings) == before
    assert (tally.commit(1).key_count, sealed.number) == (1, dying.number + 1)
    assert tally.state() == [("a", 1, 1, 1, 1, 1)]

    tally.start(2)
    failed = tally.start(2)
    staged = tally.stage(failed, "per_shop", [("a", 1, 1, 1, 1)])
    tally.store.fail_attempt(failed, "MALFORMED_RECORD: line 7")
    tally.store.halt_batch("tally", 2, "MALFORMED_RECORD: line 7")
    with refused(settings, AttemptFenced, match="recorded as failed: MALFORMED_RECORD: line 7"):
        tally.store.seal(failed, [staged], Tracked(1))
    assert tally.store.batch_statuses("tally")[-1].phase == "halted"
    tally.process(2)
    assert tally.process(2, mode="restage").number == 4
    assert tally.store.batch_statuses("tally")[-1].phase == "processed"


# declarations


@pytest.mark.promise(
    "I16",
    "fault:declaration-changed-in-between:processing",
    "fault:declaration-changed-in-between:commit",
    "error:DECLARATION_CHANGED",
)
def test_after_a_deploy_old_code_goes_on_with_nothing_and_old_partials_never_meet_the_state(
    tally: Tally, settings: Settings
) -> None:
    """A worker that was not restarted gets an error that says so."""
    tally.plan(2)
    tally.process(1, [("a", 1, 1, 1, 1)])
    newer = replace(tally.spec, version=2)
    _register(settings, newer)
    before = contents(settings)
    steps: list[Callable[[], object]] = [
        lambda: tally.commit(1),
        lambda: tally.store.commit_ready(tally.spec, "test"),
        lambda: tally.start(2),
        lambda: tally.start(1, mode="restage"),
    ]
    for step in steps:
        with pytest.raises(DeclarationChanged, match="tally: this code's declaration is not the registered one"):
            step()

    deployed = Tally(tally.store, newer)
    with pytest.raises(Unprocessed, match="tally 1:1 was computed by another declaration of the pipeline"):
        deployed.commit(1)
    assert tally.store.commit_ready(newer, "test") == []
    assert contents(settings) == before
    attempt = deployed.start(1)  # although the newest is sealed
    tally.store.seal(attempt, [deployed.stage(attempt, "per_shop", [("a", 2, 2, 2, 2)])], Tracked(1))
    assert deployed.commit(1).attempt == 2
    assert tally.state() == [("a", 2, 2, 2, 2, 1)]


# staging is dropped


@pytest.fixture
def dated(tally: Tally, as_role: Execute) -> Tally:
    """Two batches that committed two days ago, the first with two attempts; one that committed now; one uncommitted."""
    tally.plan(4)
    tally.start(1)
    for txid in (1, 2, 3, 4):
        tally.process(txid, [("a", 1, 1, 1, 1)])
    for txid in (1, 2, 3):
        tally.commit(txid)
    as_role("tidegate_owner", "UPDATE tidegate.commit SET committed_at = now() - interval '49 hours' WHERE txid < 3")
    as_role("tidegate_owner", "UPDATE tidegate.attempt SET started_at = now() - interval '50 hours' WHERE txid < 3")
    as_role("tidegate_owner", "UPDATE tidegate.attempt SET started_at = now() - interval '1 year' WHERE txid = 4")
    return tally


STAGING_TABLES = (
    "SELECT relname FROM pg_class WHERE relnamespace = 'staging'::regnamespace AND relname LIKE 'per_shop%' ORDER BY 1"
)


@pytest.mark.promise("fault:clocks-step-by-any-amount:processing")
@pytest.mark.parametrize("step", ["-1 day", "1 day"])
def test_a_clock_that_steps_lets_no_second_attempt_count(tally: Tally, as_role: Execute, step: str) -> None:
    """Another may begin in the place of one that only seems to be silent: one of them counts."""
    tally.plan(1)
    first = tally.start(1)
    moved = ", ".join(f"{column} = {column} - interval '{step}'" for column in ("started_at", "seen_at"))
    as_role("tidegate_owner", f"UPDATE tidegate.attempt SET {moved}")

    second = tally.store.start_attempt(tally.spec, 1, "another")
    staged = [tally.stage(first, "per_shop", [("a", 1, 1, 1, 1)])]
    if isinstance(second, NotStarted):
        tally.store.seal(first, staged, Tracked(0))
    else:
        with pytest.raises(AttemptFenced):
            tally.store.seal(first, staged, Tracked(0))
        tally.store.seal(second, [tally.stage(second, "per_shop", [("a", 1, 1, 1, 1)])], Tracked(0))

    tally.commit(1)
    assert tally.state() == [("a", 1, 1, 1, 1, 1)]


@pytest.mark.promise("limit:STAGING_DROPS_PER_PLAN")
def test_a_plan_drops_the_staging_of_a_few_attempts(tally: Tally, as_role: Execute) -> None:
    txids = tally.plan(STAGING_DROPS_PER_PLAN + 1)
    for txid in txids:
        tally.process(txid)
        tally.commit(txid)
    as_role("tidegate_owner", "UPDATE tidegate.commit SET committed_at = now() - interval '49 hours'")
    as_role("tidegate_owner", "UPDATE tidegate.attempt SET started_at = now() - interval '50 hours'")
    assert [tally.store.drop_old_staging(tally.spec) for _ in range(3)] == [STAGING_DROPS_PER_PLAN, 1, 0]


@pytest.mark.promise("I18", "decision:0002")
def test_staging_is_kept_until_its_batch_committed_and_the_retention_is_over(
    dated: Tally, settings: Settings, as_role: Execute
) -> None:
    """The staging of an old batch is dropped once."""
    state = dated.state()
    with StateStore.connect(replace(settings, staging_retention_hours=50)) as patient:
        assert patient.drop_old_staging(dated.spec) == 0
    as_role("tidegate_owner", "UPDATE tidegate.attempt SET started_at = now() WHERE txid = 1 AND attempt = 2")
    with closing(psycopg2.connect(**settings.conninfo(user="tidegate_stager"))) as zombie, zombie.cursor() as cursor:
        cursor.execute("SELECT FROM staging.per_shop_1_1")
        assert dated.store.drop_old_staging(dated.spec) == 1
        kept = [("per_shop_1_1",), ("per_shop_1_2",), ("per_shop_3_1",), ("per_shop_4_1",)]
        assert as_role("tidegate", STAGING_TABLES) == kept
    assert dated.store.drop_old_staging(dated.spec) == 1
    as_role("tidegate_owner", "UPDATE tidegate.attempt SET started_at = now() - interval '50 hours' WHERE txid = 1")
    assert dated.store.drop_old_staging(dated.spec) == 1
    assert as_role("tidegate", STAGING_TABLES) == [("per_shop_3_1",), ("per_shop_4_1",)]
    assert dated.store.drop_old_staging(dated.spec) == 0
    assert dated.state() == state
    assert dated.commit(1).already_committed
    dated.commit(4)


def test_texts_are_staged_as_utf8_whatever_encoding_the_session_has(
    tally: Tally, settings: Settings, as_role: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role, a database, the server or PGCLIENTENCODING may set another: the bytes would be taken for other characters."""
    as_role("postgres", f"ALTER DATABASE {settings.pg_database} SET client_encoding = 'LATIN1'")
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    tally.plan(1)
    tally.process(1, [("Zürich €", 1, 1, 1, 1)])
    tally.commit(1)
    assert [row[0] for row in tally.state()] == ["Zürich €"]


# another incarnation of the database


@pytest.mark.promise(
    "fault:database-is-restored-copied-or-promoted:processing", "fault:database-is-restored-copied-or-promoted:commit"
)
def test_every_step_halts_in_a_restored_database(tally: Tally, settings: Settings, as_role: Execute) -> None:
    """Commits may be missing there: nothing is planned, processed or committed until a person accepts it (I9, row 30)."""
    tally.plan(2)
    tally.process(1, [("a", 1, 1, 1, 1)])
    as_role("tidegate_owner", "UPDATE tidegate.cursor SET epoch = '7000000000000000000/00000001'")
    steps: list[Callable[[], object]] = [
        lambda: tally.plan(1, run_id="next"),
        lambda: tally.start(2),
        lambda: tally.commit(1),
        lambda: tally.store.replay_quarantined(tally.spec, "me", "they are corrected"),
    ]
    for step in steps:
        with refused(settings, HoleDetected, r"restored, promoted or copied.*tidegate migrate --accept-epoch"):
            step()


def _look(tally: Tally) -> tuple[BatchInput | None, list[bytes]]:
    after = tally.store.last_opened("tally")
    return after, frozen(after.txid + 1 if after else 1)


def seen_batch(txid: int) -> BatchInput:
    return BatchInput(txid, {}, b"digest", None)


def _register(settings: Settings, spec: object) -> None:
    with migrations.connected(settings) as connection:
        assert registration.register(connection, spec)
