"""Mending a quarantined record: what is kept, what is refused, and two operators at the same moment."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import pytest

from tests.integration.conftest import Tally
from tests.store import MAX_BYTES, Mend, errors

PARSED = '{"shop":"a","day":"2013-01-01","cents":-5,"ratio":"NaN","open":null,"tags":["x"],"more":{"y":1}}'
RAW, COLUMNS = 1, 2
QUARANTINE = (
    "INSERT INTO tidegate.quarantine (pipeline, txid, number, reason, payload, is_raw) "
    "SELECT 'tally', 1, number, 'no int', %s, %s FROM generate_series(%s, %s) AS number"
)


@pytest.fixture
def waiting(tally: Tally) -> Tally:
    """Tally with a committed batch that has set aside a raw record and a parsed one."""
    tally.having(1, 1, 1)
    tally.sql(QUARANTINE, ["a,five", True, RAW, RAW])
    tally.sql(QUARANTINE, [PARSED, False, COLUMNS, COLUMNS])
    return tally


def mend(tally: Tally, number: int, payload: str, *, by: str = "anna", again: bool = False, txid: int = 1) -> object:
    return tally.store.mend_quarantined("tally", txid, number, Mend(payload, by, "the till was wrong", again))


def record(tally: Tally, number: int) -> dict[str, Any]:
    (found,) = (row for row in tally.store.quarantined("tally") if row["number"] == number)
    return found


def test_a_second_mend_says_that_it_replaces_the_first(waiting: Tally) -> None:
    says = "tally 1 has no record 3 in quarantine|tally has no txid 7"
    waiting.refuses(errors.UnknownBatch, says, partial(mend, waiting, 3, "a,5"), partial(mend, waiting, 1, "a,5", txid=7))
    before = record(waiting, RAW)
    mend(waiting, RAW, "a,5")

    after = record(waiting, RAW)
    mended = {"mended_payload": "a,5", "mended_by": "anna", "mended_reason": "the till was wrong"}
    assert after == before | mended | {"mended_at": after["mended_at"]}
    assert after["mended_at"] > after["quarantined_at"]
    (action,) = waiting.store.batch_history("tally", 1).actions
    expected = ("mend", 1, "anna", "record 1: the till was wrong")
    assert (action["action"], action["txid"], action["owner"], action["reason"]) == expected

    says = r"record 1, was mended on .* by anna: the till was wrong\. To replace that.*--again"
    waiting.refuses(errors.RangeRefused, says, partial(mend, waiting, RAW, "a,6", by="berta"))
    mend(waiting, RAW, "a,6", by="berta", again=True)
    assert (record(waiting, RAW)["mended_payload"], record(waiting, RAW)["mended_by"]) == ("a,6", "berta")
    assert [action["owner"] for action in waiting.store.batch_history("tally", 1).actions] == ["anna", "berta"]

    # The batch that takes a record up may have read it already. A skipped replay gives it back, with its mend.
    assert waiting.store.replay_quarantined(waiting.spec, "anna", "mended") == (2, 2)
    says = r"record 1, was taken up by txid 2, so it is not mended"
    waiting.refuses(errors.RangeRefused, says, partial(mend, waiting, RAW, "a,7", again=True))
    waiting.fail(2, "TEST: failed", is_poison=False)
    assert waiting.store.skip_batch(waiting.spec, 2, "anna", "not yet") is not None
    assert record(waiting, RAW)["mended_payload"] == "a,6"
    mend(waiting, RAW, "a,7", again=True)
    assert record(waiting, RAW)["mended_payload"] == "a,7"


@pytest.mark.promise("limit:MAX_BYTES")
def test_a_parsed_record_takes_json_of_its_columns(waiting: Tally) -> None:
    taken = {
        COLUMNS: [
            PARSED.replace("-5", "5.00"),
            PARSED.replace('"a"', "null"),
            PARSED.replace('"NaN"', "1.5e3"),
            PARSED.replace('"open":null', '"open":true'),
            f" {PARSED.replace(',', ' , ')}\n",
            PARSED.replace('"a"', r'"a\u0000"'),  # what a state can keep is decided by the replay
            PARSED.replace("-5", "9" * 5000),
        ],
        RAW: ['"a\nb",5', "x" * MAX_BYTES],
    }
    for number, payloads in taken.items():
        for payload in payloads:
            mend(waiting, number, payload, again=True)
            assert record(waiting, number)["mended_payload"] == payload
    for payload in (
        "{",
        "[]",
        PARSED.replace('"cents":-5,', ""),
        PARSED.replace("{", '{"new":1,', 1),
        PARSED.replace("{", '{"cents":1,', 1),
        PARSED.replace("-5", "NaN"),
    ):
        with pytest.raises(errors.UsageError, match="has to be a JSON object of all its columns"):
            mend(waiting, COLUMNS, payload, again=True)


def test_of_two_operators_who_mend_at_once_one_is_refused(waiting: Tally) -> None:
    """The second has not seen the first one's mend, so it does not replace it; many times."""
    waiting.sql(QUARANTINE, ["a,five", True, 10, 29])
    barrier = Barrier(2)

    def refusal(number: int, name: str) -> str | None:
        barrier.wait()
        try:
            mend(waiting, number, f"a,{name}", by=name)
        except errors.RangeRefused as refused:
            return str(refused)
        return None

    with ThreadPoolExecutor(2) as threads:
        for number in range(10, 30):
            answers = dict(zip(("anna", "berta"), threads.map(partial(refusal, number), ("anna", "berta")), strict=True))
            (winner,) = (name for name, answer in answers.items() if answer is None)
            (refused,) = filter(None, answers.values())
            assert f"by {winner}: the till was wrong" in refused
            assert record(waiting, number)["mended_payload"] == f"a,{winner}"
    assert len(waiting.store.batch_history("tally", 1).actions) == 20
