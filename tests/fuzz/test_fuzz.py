"""Random inputs of every format are read as by an independent reader, or refused with place and reason.

Some hundred inputs of each format; with ``SOAK`` set, FUZZ_INPUTS of them. A failure prints FUZZ_SEED and FUZZ_ROUND: set both
to reproduce it.
"""

import os
import time
from pathlib import Path

import pytest

from tests.fuzz.csv_inputs import Csv
from tests.fuzz.harness import Format, Fuzz
from tests.fuzz.json_inputs import Json
from tests.fuzz.text_inputs import Text

FORMATS: list[Format] = [Csv(), Json(), Text()]
SEED = int(os.environ.get("FUZZ_SEED", "1"))
INPUTS = int(os.environ.get("FUZZ_INPUTS", "5000" if os.environ.get("SOAK") else "320"))
PER_ROUND, PER_BATCH = 40, 20
SHOWN_FAILURES = 10


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_parsers_read_inputs_as_an_independent_reader_does(tmp_path: Path, format: Format) -> None:
    """Run rounds, or the one that is asked for, and show what was found."""
    started, fuzz = time.monotonic(), Fuzz(tmp_path, format, SEED)
    only = os.environ.get("FUZZ_ROUND")
    for number in [int(only)] if only else range(-(-INPUTS // PER_ROUND)):
        fuzz.round(number, PER_ROUND, PER_BATCH)
        if len(fuzz.found) >= SHOWN_FAILURES:
            break
    print(  # noqa: T201 - the figures of a long run
        f"{fuzz.format.name}: {fuzz.inputs} inputs with {fuzz.records} records, {fuzz.refused} inputs refused as a whole, "
        f"{fuzz.quarantined} records in quarantine, seed {SEED}, {time.monotonic() - started:.0f} s"
    )
    assert not fuzz.found, f"{len(fuzz.found)} wrong:\n" + "\n".join(fuzz.found[:SHOWN_FAILURES])
