"""Shell completion, in real shells: verbs, options, pipelines, states, phases and error codes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import CommandLine, check_schema
from tests.conftest import COMMAND
from tests.examples import EXAMPLES
from tidegate.cli import VERBS

BASH = shutil.which("bash")
# Calls the function that completes, as bash itself does after a tabulator, and prints what it offers.
ASK_BASH = """
eval "$(tidegate completion bash)"
COMP_WORDS=(%s); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_LINE="${COMP_WORDS[*]}"; COMP_POINT=${#COMP_LINE}
command=$(complete -p tidegate | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
$command tidegate "${COMP_WORDS[$COMP_CWORD]}" "${COMP_WORDS[$((COMP_CWORD - 1))]}"
printf '%%s\\n' "${COMPREPLY[@]}"
"""


def bash(words: str, **environment: str) -> list[str]:
    """Return what bash offers after these words."""
    if BASH is None:
        pytest.skip("bash is not installed: apt-get install bash")
    environ = {"PATH": f"{COMMAND.parent}:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TIDEGATE_HOME": str(EXAMPLES), **environment}
    done = subprocess.run([BASH, "-c", ASK_BASH % words], capture_output=True, text=True, check=False, env=environ)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.promise("verb:completion")
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("tidegate ''", list(VERBS)),
        ("tidegate re", ["restore", "retry", "redo", "resume", "rebuild", "retire", "reinstate"]),
        ("tidegate inspect fl", ["flights"]),
        ("tidegate trigger ''", ["flights", "word_count"]),
        ("tidegate quarantine ''", ["list", "mend", "replay"]),
        ("tidegate quarantine mend w", ["word_count"]),
        ("tidegate inspect flights --state ''", ["daily"]),
        ("tidegate get flights ''", ["daily"]),
        ("tidegate get nothing ''", []),
        ("tidegate query w", ["words_total"]),
        ("tidegate query words_total w", []),
        ("tidegate inspect flights --phase p", ["planned", "processing", "processed"]),
        ("tidegate inspect flights --error source_", ["SOURCE_CHANGED", "SOURCE_UNAVAILABLE", "SOURCE_UNREADABLE"]),
        ("tidegate error MALF", ["MALFORMED_RECORD"]),
        ("tidegate inspect flights --from-", ["--from-txid"]),
        ("tidegate schema quarantine ''", ["list", "mend", "replay"]),
        ("tidegate completion ''", ["bash", "zsh", "fish"]),
        ("tidegate inspect flights --limit 5 --state d", ["daily"]),
    ],
)
def test_bash_completes_words(words: str, offered: list[str]) -> None:
    """Without a database: only what the shell needs is looked up."""
    assert bash(words) == offered


@pytest.mark.parametrize(
    "code", ["raise RuntimeError('broken')", "import sys; sys.exit(3)", "print('noise'); 1 / 0", "def ("], ids=str
)
def test_a_broken_pipeline_disturbs_no_completion(tmp_path: Path, code: str) -> None:
    """Its name is offered, so that the verb can say what is wrong; its states are not, and nothing is printed."""
    (tmp_path / "broken.py").write_text(code)
    metadata = tmp_path / "broken-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[tidegate.pipelines]\nbroken = broken:PIPELINE\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    assert bash("tidegate run ''", **environment) == ["broken", "flights", "word_count"]
    assert bash("tidegate get broken ''", **environment) == []
    assert bash("tidegate get flights ''", **environment) == ["daily"]


@pytest.mark.parametrize(
    ("shell", "script"),
    [
        ("zsh", 'autoload -Uz compinit; compinit -u; eval "$(tidegate completion zsh)"; print ${_comps[tidegate]}'),
        ("fish", "tidegate completion fish | source; complete --do-complete 'tidegate inspect fl'"),
    ],
)
def test_other_shells_take_the_script(tmp_path: Path, shell: str, script: str) -> None:
    """In a real shell, where there is one."""
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed: apt-get install {shell}")
    environ = {"PATH": f"{COMMAND.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "TERM": "dumb", "TIDEGATE_HOME": str(EXAMPLES)}
    done = subprocess.run([program, "-c", script], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    assert ("flights" if shell == "fish" else "_tidegate_completion") in done.stdout


@pytest.mark.promise("performance:each-verb-loads-its-own-module-parsed")
def test_names_are_completed_without_what_a_verb_needs_to_run() -> None:
    """Or each tabulator would take as long as a verb."""
    program = (
        "import sys\nfrom tidegate.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('sqlalchemy', 'pyspark', 'airflow', 'pandas', 'pyarrow', 'httpx') if m in sys.modules])"
    )
    for words, offered in (("tidegate inspect fl", "plain,flights"), ("tidegate quar", "plain,quarantine")):
        asked = {"_TIDEGATE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.argv = ['tidegate']\n{program}"],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": "/usr/bin:/bin", "TIDEGATE_HOME": str(EXAMPLES), **asked},
        )
        assert done.stdout.splitlines() == [offered, "[]"]


@pytest.mark.promise("json:completion")
def test_the_help_says_how_to_install_it(tidegate: CommandLine) -> None:
    """A line for each shell; programs get the script too."""
    shown = tidegate("completion", "--help").stdout
    assert 'eval "$(tidegate completion bash)"' in shown
    assert "~/.config/fish/completions/tidegate.fish" in shown
    done = tidegate("completion", "bash", "--json")
    check_schema("completion", json.loads(done.stdout))
