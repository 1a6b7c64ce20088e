"""Histories, estimates and updates in one pipeline: crashes at any statement of a commit leave each as a clean run would.

All other kinds: tests/acceptance/test_crashes.py.
"""

from collections.abc import Callable
from functools import reduce
from operator import or_

import pytest
import sqlalchemy as sa

from tests.conformance.conftest import Flow, Stream
from tests.crashes import Crash, EachPoint
from tests.store import UpdateBatch
from tidegate.jobs import ApproxDistinct, History, Pipeline, State, Update
from tidegate.state_store import Settings

OUTBOX = sa.Table(
    "outbox",
    sa.MetaData(schema="shop"),
    sa.Column("word", sa.Text),
    sa.Column("moment", sa.BigInteger),
    sa.Column("txid", sa.BigInteger),
)


def to_outbox(batch: UpdateBatch) -> None:
    for parity in (0, 1):
        chosen = sa.select(batch.rows.c.word, batch.rows.c.moment, sa.literal(batch.txid, sa.BigInteger)).where(
            batch.rows.c.moment % 2 == parity
        )
        batch.execute(sa.insert(OUTBOX).from_select(["word", "moment", "txid"], chosen))


PIPELINE = Pipeline(
    "kinds",
    Stream("transactional"),
    {
        "versions": History({"word": "text"}, {"label": "text"}, {"moment": "bigint"}),
        "estimated": State(key={"word": "text"}, aggregates={"moments": ApproxDistinct("moment", "bigint", error=0.3)}),
        "own": Update({"word": "text", "moment": "bigint"}, to_outbox),
    },
)


def bits(moments: list[int]) -> int:
    return reduce(or_, (1 << moment % 60 for moment in moments))


class Kinds(Flow):
    """Batches of words, each with the moment at which it came."""

    def finish_words(self, txid: int, words: list[tuple[str, int]]) -> None:
        attempt = self.start(txid)
        by_word = {word: [moment for other, moment in words if other == word] for word, _ in words}
        staged = [
            self.stage(attempt, "versions", [(word, moment, f"at {moment}") for word, moment in words]),
            self.stage(attempt, "estimated", [(word, f"{{{bits(moments)},0,0}}") for word, moments in by_word.items()]),
            self.stage(attempt, "own", [(place, *row) for place, row in enumerate(words)]),
        ]
        self.seal(attempt, *staged)


@pytest.mark.promise("I2", "fault:process-dies-at-any-statement:commit")
def test_a_crash_at_any_statement_of_a_commit_leaves_every_kind_of_state_whole(
    settings: Settings, register: Callable[..., None]
) -> None:
    register(PIPELINE)
    f = Kinds(settings, PIPELINE.spec)
    with f.owner.engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema("shop"))
        OUTBOX.metadata.create_all(connection)
        connection.execute(sa.text("GRANT USAGE ON SCHEMA shop TO tidegate"))
        connection.execute(sa.text("GRANT SELECT, INSERT ON shop.outbox TO tidegate"))
    deaths = EachPoint()
    words: list[tuple[str, int, int]] = []
    is_done = False
    while not is_done:
        (txid,) = f.plan(3, run_id=f"run {len(deaths.points)}") or []
        moment = 10 * txid
        batch = [("a", moment), (f"word {txid}", moment + 1), ("a", moment + 2)]
        words += [(*row, txid) for row in batch]
        f.finish_words(txid, batch)
        try:
            with deaths.armed():
                f.commit(txid)
            is_done = True
        except Crash:
            f.die()
            f.commit(txid)
    moments = {word: sorted(moment for other, moment, _ in words if other == word) for word, _, _ in words}
    assert {(row["word"], row["moment"], row["label"], row["valid_to"]) for row in f.rows("versions")} == {
        (word, start, f"at {start}", end)
        for word, starts in moments.items()
        for start, end in zip(starts, [*starts[1:], None], strict=True)
    }
    assert {row["word"]: row["moments_bits"] for row in f.rows("estimated")} == {
        word: [bits(found), 0, 0] for word, found in moments.items()
    }
    with f.store.engine.connect() as connection:
        assert sorted(map(tuple, connection.execute(sa.select(OUTBOX)))) == sorted(words)
    for step in (
        "INSERT INTO shop.outbox",
        "INSERT INTO tidegate.open_commit",
        "after COMMIT",
    ):
        assert any(step in point for point in deaths.points), f"no crash was injected at {step}: {deaths.points}"
    f.close()
