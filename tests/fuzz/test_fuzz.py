"""Random inputs of every format are read as by an independent reader, or refused with place and reason.

Some hundred inputs by parsers in this process; with ``SOAK`` set, FUZZ_INPUTS of each format through Spark and Postgres. A
failure prints FUZZ_SEED and FUZZ_ROUND: set both to reproduce it.
"""

import os
import time
from pathlib import Path

import pytest

from tests.fuzz.csv_inputs import Csv
from tests.fuzz.harness import Format, Fuzz
from tests.fuzz.json_inputs import Json
from tests.fuzz.text_inputs import Text
from tests.servers import Server

FORMATS: list[Format] = [Csv(), Json(), Text()]
SEED = int(os.environ.get("FUZZ_SEED", "1"))
INPUTS = int(os.environ.get("FUZZ_INPUTS", "5000"))
PER_ROUND, PER_BATCH = (150, 50) if INPUTS > 1000 else (60, 30)
ROUNDS_HERE = 8
SHOWN_FAILURES = 10

of_each_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


@of_each_format
def test_parsers_read_inputs_as_an_independent_reader_does(tmp_path: Path, format: Format) -> None:
    check(Fuzz(None, "", tmp_path, format, SEED), ROUNDS_HERE, 40, 20)


@pytest.mark.soak
@of_each_format
def test_inputs_are_read_as_by_an_independent_reader(server: Server, template: str, tmp_path: Path, format: Format) -> None:
    check(Fuzz(server, template, tmp_path, format, SEED), -(-INPUTS // PER_ROUND), PER_ROUND, PER_BATCH)


def check(fuzz: Fuzz, rounds: int, inputs: int, per_batch: int) -> None:
    """Run rounds, or the one that is asked for, and show what was found."""
    started = time.monotonic()
    only = os.environ.get("FUZZ_ROUND")
    for number in [int(only)] if only else range(rounds):
        fuzz.round(number, inputs, per_batch)
        if len(fuzz.found) >= SHOWN_FAILURES:
            break
    print(  # noqa: T201 - the figures of a long run
        f"{fuzz.format.name}: {fuzz.inputs} inputs with {fuzz.records} records, {fuzz.refused} inputs refused as a whole, "
        f"{fuzz.quarantined} records in quarantine, seed {SEED}, {time.monotonic() - started:.0f} s"
    )
    assert not fuzz.found, f"{len(fuzz.found)} wrong:\n" + "\n".join(fuzz.found[:SHOWN_FAILURES])
