"""Shell completion: verbs, options, pipelines, states, phases and error codes."""

import shlex

from tests import in_process
from tests.examples import EXAMPLES
from tests.store import HOME_VARIABLE
from tidegate.cli import VERBS

OFFERED = {
    "tidegate ''": list(VERBS),
    "tidegate quarantine mend w": ["word_count"],
    "tidegate inspect flights --state ''": ["daily"],
    "tidegate query w": ["words_total"],
    "tidegate inspect flights --phase p": ["planned", "processing", "processed"],
    "tidegate inspect flights --error source_": ["SOURCE_CHANGED", "SOURCE_UNAVAILABLE", "SOURCE_UNREADABLE"],
    "tidegate error MALF": ["MALFORMED_RECORD"],
}


def offered(words: str) -> list[str]:
    """Return what the command line offers to bash after these words, in the project of the examples, without a database."""
    asked = {"_TIDEGATE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(shlex.split(words)) - 1)}
    done = in_process.run([], {HOME_VARIABLE: str(EXAMPLES), **asked}, EXAMPLES)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.removeprefix("plain,") for line in done.stdout.splitlines() if line]


def test_words_are_completed() -> None:
    assert {words: offered(words) for words in OFFERED} == OFFERED
