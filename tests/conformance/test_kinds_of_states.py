"""All kinds of states in one pipeline: crashes at any statement of a commit leave each of them as a clean run would."""

from collections.abc import Callable
from functools import reduce
from operator import or_

import pytest
import sqlalchemy as sa

from tests.conformance.conftest import Flow, Stream
from tests.crashes import Crash, EachPoint
from tests.store import UpdateBatch
from tidegate.jobs import ApproxDistinct, Count, History, Newest, Pipeline, Ranges, Rows, State, Update
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
        "counted": State(key={"word": "text"}, aggregates={"lines": Count()}, kind="opaque", changes=True),
        "newest": Newest({"word": "text"}, {}, {"moment": "bigint"}),
        "versions": History({"word": "text"}, {"label": "text"}, {"moment": "bigint"}),
        "estimated": State(key={"word": "text"}, aggregates={"moments": ApproxDistinct("moment", "bigint", error=0.3)}),
        "log": Rows({"word": "text", "moment": "bigint"}, range_partitions=Ranges("moment", 5)),
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
        numbered = [(place, *row) for place, row in enumerate(words)]
        staged = [
            self.stage(attempt, "counted", [(word, len(moments)) for word, moments in by_word.items()]),
            self.stage(attempt, "newest", [(word, max(moments)) for word, moments in by_word.items()]),
            self.stage(attempt, "versions", [(word, moment, f"at {moment}") for word, moment in words]),
            self.stage(attempt, "estimated", [(word, f"{{{bits(moments)},0,0}}") for word, moments in by_word.items()]),
            self.stage(attempt, "log", numbered),
            self.stage(attempt, "own", numbered),
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
    counts = {word: sum(word == other for other, _, _ in words) for word, _, _ in words}
    assert {row["word"]: row["lines"] for row in f.rows("counted")} == counts
    assert {row["word"]: row["moment"] for row in f.rows("newest")} == {word: moment for word, moment, _ in words}
    assert sorted((row["word"], row["moment"], row["txid"]) for row in f.rows("log")) == sorted(words)
    moments = {word: sorted(moment for other, moment, _ in words if other == word) for word in counts}
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
    changes = list(f.store.changes(PIPELINE.spec.states[0]))
    added = dict.fromkeys(counts, 0)
    for change in changes:
        added[change["word"]] += change["lines"] - (change["previous_lines"] or 0)
    assert added == counts
    assert len(changes) == len({(change["txid"], change["word"]) for change in changes}) == 2 * (len(deaths.points) + 1)
    for step in (
        "INSERT INTO shop.outbox",
        "INSERT INTO state.log",
        "WITH written",
        "INSERT INTO tidegate.open_commit",
        "after COMMIT",
    ):
        assert any(step in point for point in deaths.points), f"no crash was injected at {step}: {deaths.points}"
    f.close()
