"""The output of the verbs, for people and for programs: complete, as its schema says, and the same everywhere."""

import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import click
import jsonschema
import pytest

from tests import in_process
from tests.cli.conftest import GOOD, SCHEMAS, CommandLine, write_file, write_flights
from tests.examples import EXAMPLES
from tests.integration.conftest import Tally
from tests.store import HOME_VARIABLE, SourceKind, StateKind, exactly_once
from tidegate import cli
from tidegate.explain import source_report
from tidegate.jobs import Files
from tidegate.jobs.pipelines import word_count
from tidegate.state_store import Settings, StateStore

ROWS = (GOOD, "2013,1,1,,,AA,301,LGA,ORD,733", "2013,1,1,533,-4,UA,1714,LGA,IAH,1416")
UNITED = {"carrier": "UA", "date": "2013-01-01", "flights": 2, "cancelled": 0}
UNITED |= {"delay_sum": -2, "delay_min": -4, "delay_max": 2, "distance": 2816, "txid": 1}


def _commands(group: click.Group, *names: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command, f"{name} is listed, and unknown"
        if isinstance(command, click.Group):
            yield from _commands(command, *names, name)
        else:
            yield " ".join((*names, name)), command


COMMANDS = dict(_commands(cli.app))


def test_a_source_that_hangs_hides_no_other_in_the_status(shops: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(shops.settings.home, "visits/1.csv", "page,seconds", "a,1")
    asked, ended = Files.left_alone, threading.Event()

    def left_alone(source: Files, settings: Settings) -> Any:
        if "visits" not in source.folder:
            ended.wait()
        return asked(source, settings)

    monkeypatch.setattr(Files, "left_alone", left_alone)
    monkeypatch.setattr(source_report, "SILENCE_SECONDS", 0.1)
    monkeypatch.setattr(source_report, "ANSWER_SECONDS", 4)
    try:
        found = shops.json("status")
    finally:
        ended.set()
    assert found["left_alone"] == {name: f"{name}: its source has not answered within 4 s." for name in ("flights", "orders")}
    assert list(found["unread"]) == ["visits"]


@pytest.mark.promise("verb:status", "verb:run", "verb:inspect", "verb:get", "verb:backfill")
@pytest.mark.promise("json:backfill", "json:get", "json:inspect", "json:run", "json:status")
def test_run_get_inspect_and_status_agree(tidegate: CommandLine) -> None:
    write_flights(tidegate.settings.home, 1, *ROWS)

    outcome = tidegate.json("run", "flights")
    assert (outcome["txids"], outcome["committed"]) == ([1], [1])

    american, united = tidegate.json("inspect", "flights", "--state", "daily")
    assert united == UNITED
    assert (american["flights"], american["cancelled"], american["delay_sum"], american["delay_min"]) == (1, 1, 0, None)
    assert tidegate.json("get", "flights", "daily", "UA", "2013-01-01") == [{"key": ["UA", "2013-01-01"], "row": UNITED}]

    batch = tidegate.json("inspect", "flights", "--txid", "1")
    assert (batch["status"]["phase"], batch["status"]["source_rows"], batch["status"]["key_count"]) == ("committed", 3, 2)
    (lag,) = (p for p in tidegate.json("status")["pipelines"] if p["pipeline"] == "flights")
    assert (lag["committed"], lag["pending"]) == (1, 0)

    again = tidegate("run", "flights")
    assert (again.returncode, again.stdout, again.stderr) == (0, "Skipped: nothing new at the source, no txid spent.\n", "")
    of_range = tidegate("run", "flights", "--to-txid", "1")
    assert (of_range.returncode, of_range.stdout) == (0, "Already committed: txid 1.\n")
    assert tidegate.json("status")["left_alone"] == {}

    table = tidegate("get", "flights", "daily", "UA", "2013-01-01").stdout.splitlines()
    assert [line.split() for line in table] == [list(UNITED), [str(value) for value in UNITED.values()]]
    several = tidegate.json("get", "flights", "daily", "UA", "2013-01-01", "AA", "2013-01-01")
    assert [found["row"]["carrier"] for found in several] == ["UA", "AA"]
    missing = tidegate("get", "flights", "daily", "UA", "2013-01-01", "ZZ", "2013-01-01")
    assert (missing.returncode, "UA" in missing.stdout) == (1, True)
    assert "State daily has no row for ZZ 2013-01-01." in missing.stderr

    plan = tidegate.json("backfill", "flights", "--from-txid", "1", "--to-txid", "3", "--dry-run")
    assert plan == {"already_committed": [1], "opened_before": [], "to_open": [2, 3]}
    assert len(tidegate.json("inspect", "flights")) == 1


def test_names_that_a_source_leaves_alone_are_counted_and_listed(tidegate: CommandLine) -> None:
    for name in ("_old.csv", "notes.txt", "\x1b[31m\n.csv~"):
        write_file(tidegate.settings.home, f"flights/{name}", "not for us")
    skipped, counted = tidegate("run", "flights").stdout.split("\n", 1)
    assert skipped == "Skipped: nothing new at the source, no txid spent."
    for part in ("3 name(s) are left alone, *.csv matches nothing", "2, such as \\x1b[31m\\n.csv~; ", "1, such as _old.csv. "):
        assert part in counted
    assert counted in tidegate("status").stderr
    found = tidegate.json("inspect", "flights", "--source")
    assert found["left_alone"]["does not match *.csv"] == ["\x1b[31m\n.csv~", "notes.txt"]


@pytest.mark.promise("limit:Pipeline.tries", "verb:pipelines", "json:pipelines")
def test_pipelines_lists_declarations_and_guarantees(shops: CommandLine) -> None:
    found = {row["pipeline"]: row for row in shops.json("pipelines")}
    of_flights = found["flights"]
    assert (of_flights["source"], of_flights["states"]["daily"]["key"]) == ("transactional Files", ["carrier", "date"])
    assert (of_flights["guarantee"], of_flights["on_poison"], of_flights["tries"]) == ("exactly once", "block", 6)
    orders, visits = found["orders"], found["visits"]
    assert (orders["states"]["revenue"]["kind"], orders["checks"]) == ("opaque", {"paid": "cents > 0"})
    assert orders["goes_unnoticed"] == ["rows lost on the way into revenue go unnoticed: it is unanchored"]
    assert (visits["guarantee"], visits["states"]["per_page"]["guarantee"]) == ("at least once", "at least once")
    shown = shops("pipelines").stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for line in (
        "orders Files transactional exactly once quarantine, 6 tries 4 16",
        "visits Files transactional at least once skip, 1 try 4 16",
        "visits per_page non-transactional page visits, seconds at least once",
        "orders an attempt may take 600 s",
        "visits lost rows and changed replays go unnoticed: tracking is off",
    ):
        assert line in lines
    assert "visits state per_page is at least once: the state does not keep which txid wrote a row" in " ".join(lines)
    assert max(len(line) for line in shown.splitlines()) <= 110


@pytest.mark.promise("verb:pipelines")
def test_pipelines_shows_the_guarantee_of_each_pair_of_kinds(tmp_path: Path) -> None:
    shown = in_process.run(["pipelines", "--matrix"], {}, tmp_path).stdout
    rows = {words[0]: words[1:] for line in shown.splitlines()[2:5] if (words := line.split())}
    for source in get_args(SourceKind):
        promised = ["exactly" if exactly_once(source, state) else "at" for state in get_args(StateKind)]
        assert [word for word in rows[source] if word in ("exactly", "at")] == promised
    assert max(len(line) for line in shown.splitlines()) <= 110
    matrix = json.loads(in_process.run(["pipelines", "--matrix", "--json"], {}, tmp_path).stdout)
    assert [pair for pair in matrix if (pair["why"] is None) != (pair["guarantee"] == "exactly once")] == []
    assert len(matrix) == 9


@pytest.mark.promise("verb:settings", "json:settings")
def test_settings_name_their_origin_and_hold_no_password(tidegate: CommandLine) -> None:
    rows = {row["setting"]: row for row in tidegate.json("settings")}
    assert (rows["pg_port"]["from"], rows["pg_port"]["value"]) == ("environment PGPORT", tidegate.settings.pg_port)
    shown = tidegate("settings").stdout
    secrets = [line.rsplit(":", 1)[1] for line in tidegate.settings.pg_passfile.read_text().splitlines()]
    secrets += [tidegate.settings.spark_token_file.read_text()]
    assert not [secret for secret in secrets if secret in shown]


@pytest.mark.promise("verb:explain", "json:explain")
def test_the_ways_of_batches_are_explained(tidegate: CommandLine) -> None:
    found = tidegate.json("explain", "flights")
    ways = {"1 file of 1 MiB": "one", "4 files of 0.5 MiB": "one", "1 file of 10 MiB": "many", "4 files of 100 MiB": "many"}
    assert [(path["batch"].split(",")[0], path["tasks"]) for path in found["paths"]] == list(ways.items())
    assert (found["commits_alone"], found["why_alone"], found["window"]) == (False, [], 16)
    shown = tidegate("explain", "flights")
    assert "Batches that are ready are committed together." in shown.stderr
    assert max(len(line) for line in shown.stdout.splitlines()) <= 110


@pytest.mark.promise("verb:*", "json:*")
def test_every_verb_and_option_has_help_and_every_verb_json_output_with_a_schema(tmp_path: Path) -> None:
    shown = in_process.run(["--help"], {}, tmp_path).stdout
    assert in_process.run(["--version"], {}, tmp_path).stdout == f"tidegate {version('tidegate')}\n"
    for verb, command in COMMANDS.items():
        assert command.help, verb
        assert [p.name for p in command.params if not getattr(p, "help", None) and p.name != "help"] == [], verb
        assert verb.split()[0] in shown, verb
    with_json = [verb for verb, command in COMMANDS.items() if any("--json" in p.opts for p in command.params)]
    assert list(SCHEMAS) == sorted(with_json) == sorted(COMMANDS.keys() - {"demo"})


@pytest.mark.promise("json:*")
@pytest.mark.parametrize("verb", SCHEMAS)
def test_each_schema_is_valid_and_says_its_version(verb: str) -> None:
    schema = SCHEMAS[verb]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert (schema["$id"], schema["title"]) == (f"urn:tidegate:json:{verb.replace(' ', '-')}:1", f"tidegate {verb} --json")
    for part in _objects(schema):
        assert set(part.get("required", ())) == set(part["properties"])
        assert [name for name in part["properties"] if not re.fullmatch(r"[a-z]+(_[a-z]+)*", name)] == []


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict) and "properties" in schema and schema.get("type") == "object":
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _objects(part)


# By the words on a command line, what bash is offered next; without a database.
OFFERED = {
    "tidegate ''": list(cli.VERBS),
    "tidegate quarantine mend w": ["word_count"],
    "tidegate inspect flights --state ''": ["daily"],
    "tidegate query w": ["words_total"],
    "tidegate inspect flights --phase p": ["planned", "processing", "processed"],
    "tidegate inspect flights --error source_": ["SOURCE_CHANGED", "SOURCE_UNAVAILABLE", "SOURCE_UNREADABLE"],
    "tidegate error MALF": ["MALFORMED_RECORD"],
}


@pytest.mark.parametrize("words", OFFERED)
def test_words_are_completed(words: str) -> None:
    asked = {"_TIDEGATE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(shlex.split(words)) - 1)}
    done = in_process.run([], {HOME_VARIABLE: str(EXAMPLES), **asked}, EXAMPLES)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.removeprefix("plain,") for line in done.stdout.splitlines() if line] == OFFERED[words]


@pytest.mark.promise("verb:query", "json:query")
def test_a_query_is_listed_and_answered_with_its_txid(tidegate: CommandLine, store: StateStore, register: Callable) -> None:
    register(word_count.PIPELINE)
    Tally(store, word_count.PIPELINE.spec).having(2, 2, 2, word_count=[("the", 2), ("sea", 1)])
    answer = {"query": "words_total", "txids": {"word_count": 2}, "columns": [{"name": "total", "type": "numeric"}]}
    assert tidegate.json("query", "words_total", "the", "sea", "unknown") == {**answer, "rows": [{"total": "6"}]}
    assert tidegate.json("query", "words_total")["rows"] == [{"total": "0"}]
    shown = tidegate("query", "words_total", "the", "--", "-1", "--json")
    assert (shown.returncode, shown.stdout.split(), shown.stderr) == (0, ["total", "4"], "As of txid 2 of word_count.\n")
    (found,) = tidegate.json("query")
    assert (found["name"], found["reads"]) == ("words_total", ["word_count.word_count"])
    assert found["arguments"] == {"words": "text[]"}
    assert "words_total WORDS..." in tidegate("query").stdout


@pytest.mark.promise("verb:skip", "json:skip", "decision:0017", "error:MALFORMED_RECORD")
def test_a_bad_batch_is_given_up_only_with_yes(tidegate: CommandLine) -> None:
    file = write_flights(tidegate.settings.home, 1, ROWS[0], "2013,1,1,five,2,UA,1545,EWR,IAH,1400", ROWS[0])
    *progress, error, more = tidegate.refused("run", "flights", exit_code=1).splitlines()
    assert all(line.startswith("flights: ") for line in progress)
    assert re.match(f"tidegate: .*{file}, line 3.*does not fit the schema", error)
    assert more == "More: tidegate error MALFORMED_RECORD"
    (batch,) = tidegate.json("inspect", "flights")
    assert (batch["phase"], "MALFORMED_RECORD" in batch["waits_for"]) == ("halted", True)
    assert tidegate.json("inspect", "flights", "--state", "daily") == []
    unconfirmed = tidegate.refused("skip", "flights", "1", "--reason", "a test record")
    assert re.search(r"is halted \(MALFORMED_RECORD.*Add --yes", unconfirmed, re.DOTALL)
    assert tidegate.json("skip", "flights", "1", "--reason", "a test record", "--yes")["skipped"] is True
    write_flights(tidegate.settings.home, 2, *ROWS)
    assert tidegate.json("run", "flights")["committed"] == [2]
    first, second = tidegate.json("inspect", "flights")
    assert (first["phase"], second["phase"]) == ("skipped", "committed")
    assert "a test record" in tidegate("inspect", "flights", "--txid", "1").stdout
