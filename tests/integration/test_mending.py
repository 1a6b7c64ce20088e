"""Mending a quarantined record: what is kept, what is refused, and two operators at the same moment."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.conftest import Execute, Tally, contents, refused
from tests.store import MAX_BYTES, Mend, Original
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import RangeRefused, TidegateError, UnknownBatch, UsageError

PARSED = '{"shop":"a","day":"2013-01-01","cents":-5,"ratio":"NaN","open":null,"tags":["x"],"more":{"y":1}}'
RAW = (1, 1)
COLUMNS = (1, 2)


@pytest.fixture
def waiting(tally: Tally, as_role: Execute) -> Tally:
    """Tally with a committed batch that has set aside a raw record and a parsed one."""
    tally.plan()
    tally.process(1)
    tally.commit(1)
    as_role(
        "tidegate_owner",
        "INSERT INTO tidegate.quarantine (pipeline, txid, number, reason, origin, payload, is_raw) "
        "VALUES ('tally', 1, 1, 'no int', 'a.csv, line 2', 'a,five', true), "
        "('tally', 1, 2, 'a check', 'a.csv, line 3', %s, false)",
        [PARSED],
    )
    return tally


def mend(tally: Tally, record: tuple[int, int], payload: str, *, by: str = "anna", again: bool = False) -> None:
    tally.store.mend_quarantined("tally", *record, Mend(payload, by, "the till was wrong", again))


def record(tally: Tally, key: tuple[int, int]) -> dict[str, Any]:
    (found,) = (row for row in tally.store.quarantined("tally") if (row["txid"], row["number"]) == key)
    return found


def test_a_second_mend_says_that_it_replaces_the_first(waiting: Tally, settings: Settings) -> None:
    for key, message in {(1, 3): "tally 1 has no record 3 in quarantine", (7, 1): "tally has no txid 7"}.items():
        with pytest.raises(UnknownBatch, match=message):
            mend(waiting, key, "a,5")
    before = record(waiting, RAW)
    mend(waiting, RAW, "a,5")

    after = record(waiting, RAW)
    assert (after["mended_payload"], after["mended_by"], after["mended_reason"]) == ("a,5", "anna", "the till was wrong")
    assert after["mended_at"] > after["quarantined_at"]
    assert {name: value for name, value in after.items() if not name.startswith("mended")} == {
        name: value for name, value in before.items() if not name.startswith("mended")
    }
    (action,) = waiting.store.batch_history("tally", 1).actions
    assert (action["action"], action["txid"], action["owner"]) == ("mend", 1, "anna")
    assert action["reason"] == "record 1: the till was wrong"

    before = contents(settings)
    with pytest.raises(
        RangeRefused, match=r"record 1, was mended on .* by anna: the till was wrong\. To replace that.*--again"
    ):
        mend(waiting, RAW, "a,6", by="berta")
    assert contents(settings) == before

    mend(waiting, RAW, "a,6", by="berta", again=True)
    assert (record(waiting, RAW)["mended_payload"], record(waiting, RAW)["mended_by"]) == ("a,6", "berta")
    assert [action["owner"] for action in waiting.store.batch_history("tally", 1).actions] == ["anna", "berta"]


@pytest.mark.promise("limit:MAX_BYTES")
def test_a_parsed_record_takes_json_of_its_columns(waiting: Tally) -> None:
    for payload in (
        PARSED.replace("-5", "5"),
        PARSED.replace("-5", "5.00"),
        PARSED.replace('"a"', "null"),
        PARSED.replace('"NaN"', "1.5e3"),
        PARSED.replace('"open":null', '"open":true'),
        f" {PARSED.replace(',', ' , ')}\n",
        PARSED.replace('"a"', r'"a\u0000"'),  # what a state can keep is decided by the replay
        PARSED.replace("-5", "9" * 5000),
    ):
        mend(waiting, COLUMNS, payload, again=True)
        assert record(waiting, COLUMNS)["mended_payload"] == payload
    for payload in (
        "{",
        "[]",
        PARSED.replace('"cents":-5,', ""),
        PARSED.replace("{", '{"new":1,', 1),
        PARSED.replace("{", '{"cents":1,', 1),
        PARSED.replace("-5", "NaN"),
    ):
        with pytest.raises(UsageError, match="has to be a JSON object of all its columns"):
            mend(waiting, COLUMNS, payload, again=True)
    for payload in ('"a\nb",5', "x" * MAX_BYTES):
        mend(waiting, RAW, payload, again=True)
        assert record(waiting, RAW)["mended_payload"] == payload


def test_a_record_that_was_taken_up_is_not_mended(waiting: Tally, settings: Settings) -> None:
    """Its batch may have read it already. A skipped replay gives it back, with its mend."""
    mend(waiting, RAW, "a,5")
    assert waiting.store.replay_quarantined(waiting.spec, "anna", "mended") == (2, 2)
    with refused(settings, RangeRefused, match=r"record 1, was taken up by txid 2, so it is not mended"):
        mend(waiting, RAW, "a,6", again=True)

    attempt = waiting.start(2)
    waiting.store.fail_attempt(attempt, "TEST: failed")
    assert waiting.store.skip_batch(waiting.spec, 2, "anna", "not yet") is not None
    assert record(waiting, RAW)["mended_payload"] == "a,5"
    mend(waiting, RAW, "a,6", again=True)
    assert record(waiting, RAW)["mended_payload"] == "a,6"


def outcomes(*actions: Callable[[StateStore], Any], store: StateStore) -> list[Any]:
    barrier, found = threading.Barrier(len(actions)), [None] * len(actions)

    def act(number: int) -> None:
        barrier.wait()
        try:
            found[number] = actions[number](store)
        except TidegateError as error:
            found[number] = error

    threads = [threading.Thread(target=act, args=[number]) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_of_two_operators_who_mend_at_once_one_is_told(waiting: Tally) -> None:
    """The second has not seen the first one's mend, so it does not replace it; many times."""
    for number in range(10, 30):
        with waiting.store.engine.begin() as connection:
            connection.exec_driver_sql(
                "INSERT INTO tidegate.quarantine (pipeline, txid, number, reason, payload, is_raw) "
                f"VALUES ('tally', 1, {number}, 'no int', 'a,five', true)"
            )

        def by(name: str, number: int = number) -> Callable[[StateStore], None]:
            return lambda store: store.mend_quarantined("tally", 1, number, Mend(f"a,{name}", name, "why"))

        results = outcomes(by("anna"), by("berta"), store=waiting.store)

        (refused,) = (result for result in results if not isinstance(result, Original))
        winner = ("anna", "berta")[1 - results.index(refused)]
        assert isinstance(refused, RangeRefused)
        assert f"by {winner}: why" in str(refused)
        assert record(waiting, (1, number))["mended_payload"] == f"a,{winner}"
    assert len(waiting.store.batch_history("tally", 1).actions) == 20
