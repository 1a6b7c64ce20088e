"""Shell completion: verbs, options, pipelines, states, phases and error codes."""

import shlex
import subprocess
from pathlib import Path

from tests import in_process
from tests.conftest import COMMAND
from tests.examples import EXAMPLES
from tests.store import HOME_VARIABLE
from tests.unit.test_registry import DECLARATION
from tidegate.cli import VERBS

# Calls the function that completes, as bash itself does after a tabulator, and prints what it offers.
ASK_BASH = """
eval "$(_TIDEGATE_COMPLETE=bash_source tidegate)"
COMP_WORDS=(tidegate quarantine mend w); COMP_CWORD=3; COMP_LINE="${COMP_WORDS[*]}"; COMP_POINT=${#COMP_LINE}
command=$(complete -p tidegate | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
$command tidegate w mend
printf '%s\\n' "${COMPREPLY[@]}"
"""
OFFERED = {
    "tidegate ''": list(VERBS),
    "tidegate re": ["restore", "retry", "redo", "resume", "rebuild", "retire", "reinstate"],
    "tidegate inspect fl": ["flights"],
    "tidegate trigger ''": ["flights", "word_count"],
    "tidegate quarantine ''": ["list", "mend", "replay"],
    "tidegate quarantine mend w": ["word_count"],
    "tidegate inspect flights --state ''": ["daily"],
    "tidegate get flights ''": ["daily"],
    "tidegate get nothing ''": [],
    "tidegate query w": ["words_total"],
    "tidegate query words_total w": [],
    "tidegate inspect flights --phase p": ["planned", "processing", "processed"],
    "tidegate inspect flights --error source_": ["SOURCE_CHANGED", "SOURCE_UNAVAILABLE", "SOURCE_UNREADABLE"],
    "tidegate error MALF": ["MALFORMED_RECORD"],
    "tidegate inspect flights --from-": ["--from-txid"],
    "tidegate inspect flights --limit 5 --state d": ["daily"],
}


def offered(words: str, **environment: str) -> list[str]:
    """Return what the command line offers to bash after these words, in the project of the examples, without a database."""
    asked = {"_TIDEGATE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(shlex.split(words)) - 1)}
    done = in_process.run([], {HOME_VARIABLE: str(EXAMPLES), **asked, **environment}, EXAMPLES)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.removeprefix("plain,") for line in done.stdout.splitlines() if line]


def test_words_are_completed() -> None:
    assert {words: offered(words) for words in OFFERED} == OFFERED


def test_only_states_that_can_be_read_are_offered(tmp_path: Path) -> None:
    (tmp_path / "pipelines").mkdir()
    update = (
        DECLARATION.format(name="shop")
        .replace("import ", "import Rows, Update, ")
        .replace("{", '{"own": Update({"value": "text"}, lambda batch: None), "log": Rows({"value": "text"}), ', 1)
    )
    (tmp_path / "pipelines/shop.py").write_text(update)
    home = {HOME_VARIABLE: str(tmp_path)}
    assert offered("tidegate get shop ''", **home) == ["log", "shop_state"]
    assert offered("tidegate changes shop ''", **home) == ["log"]


def test_bash_takes_the_script(tmp_path: Path) -> None:
    environ = {"PATH": f"{COMMAND.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "TERM": "dumb", "TIDEGATE_HOME": str(EXAMPLES)}
    done = subprocess.run(["bash", "-c", ASK_BASH], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    assert "word_count" in done.stdout
