"""The verbs pipelines, settings and migrate."""

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import click

from tidegate import output
from tidegate.commands import as_json, connected
from tidegate.commands.act.operator_name import operator
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.registry import all_pipelines, none_found
from tidegate.jobs.states import AnyState
from tidegate.state_store.base.errors import DeclarationChanged, HoleDetected, SettingsInvalid, UsageError
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.pipeline_spec import PipelineSpec, SourceKind, StateKind, exactly_once

# These make tables fit a terminal of 110 columns.
VALUES_CHARACTERS, NOTE_CHARACTERS, WHY_CHARACTERS = 36, 90, 70


@click.command()
@click.option("--matrix", is_flag=True, help="Show the guarantee of every pair of kinds of source and state, instead.")
@as_json
def pipelines(matrix: bool, as_json: bool) -> None:
    """List the declared pipelines: source, states, guarantees with their reasons, handling of bad records."""
    if matrix:
        _show_matrix(as_json)
        return
    declared, broken = all_pipelines()
    if as_json:
        output.print_json([_facts(pipeline) for pipeline in declared])
    elif declared:
        _show(declared)
    elif not broken:
        output.say(none_found())
    _refuse(broken)


def _refuse(broken: Sequence[str]) -> None:
    """Name the pipelines that a verb had to leave out, once it has done the rest.

    Raises: SettingsInvalid.
    """
    if broken:
        raise SettingsInvalid(" ".join(broken))


def _show(declared: Sequence[Pipeline]) -> None:
    rows = [
        [
            p.name,
            type(p.source).__name__,
            p.source.kind,
            _guarantee(p.is_exactly_once),
            _poison(p),
            p.concurrency,
            p.spec.window,
        ]
        for p in declared
    ]
    names = ["pipeline", "source", "kind", "guarantee", "bad batches", "at once", "window"]
    output.print_table("Pipelines", names, rows)
    output.out().print()
    rows = [
        [
            p.name,
            name,
            state.kind,
            ", ".join(column.name for column in state.spec(name).row_key),
            textwrap.wrap(", ".join(_values(name, state)), VALUES_CHARACTERS),
            _guarantee(exactly_once(p.source.kind, state.kind)),
        ]
        for p in declared
        for name, state in p.states.items()
    ]
    output.print_table("States", ["pipeline", "state", "kind", "key", "values", "guarantee"], rows)
    if notes := [[p.name, textwrap.wrap(note, NOTE_CHARACTERS)] for p in declared for note in _notes(p)]:
        output.out().print()
        output.print_table("To know", ["pipeline", "what"], notes)


def _values(name: str, state: AnyState) -> list[str]:
    spec = state.spec(name)
    return [column.name for column in spec.results]


def _facts(pipeline: Pipeline) -> dict[str, Any]:
    return {
        "pipeline": pipeline.name,
        "source": f"{pipeline.source.kind} {type(pipeline.source).__name__}",
        "source_kind": pipeline.source.kind,
        "states": {
            name: {
                "kind": state.kind,
                "key": [column.name for column in state.spec(name).row_key],
                "values": _values(name, state),
                "guarantee": _guarantee(exactly_once(pipeline.source.kind, state.kind)),
                "why": why_not_exactly_once(pipeline.source.kind, state.kind),
            }
            for name, state in pipeline.states.items()
        },
        "guarantee": _guarantee(pipeline.is_exactly_once),
        "on_poison": pipeline.on_poison,
        "tries": pipeline.tries,
        "checks": pipeline.conditions,
        "batch_checks": {name: check.otherwise for name, check in pipeline.checks.items()},
        "queries": {query.of: query.as_of for query in pipeline.queries},
        "tracking": pipeline.tracking,
        "goes_unnoticed": pipeline.lost_tracking,
        "message_timeout_seconds": pipeline.message_timeout_seconds,
        "concurrency": pipeline.concurrency,
        "window": pipeline.spec.window,
        "version": pipeline.version,
        "description": pipeline.description,
    }


def _show_matrix(as_json: bool) -> None:
    sources, states = get_args(SourceKind), get_args(StateKind)
    if as_json:
        output.print_json(
            [
                {
                    "source": source,
                    "state": state,
                    "guarantee": _guarantee(exactly_once(source, state)),
                    "why": why_not_exactly_once(source, state),
                }
                for source in sources
                for state in states
            ]
        )
        return
    rows = [[source, *(_guarantee(exactly_once(source, state)) for state in states)] for source in sources]
    output.print_table("What kinds of source and state give", ["source", *(f"{state} state" for state in states)], rows)
    output.out().print()
    reasons = [
        [source, state, textwrap.wrap(why, WHY_CHARACTERS)]
        for source in sources
        for state in states
        if (why := why_not_exactly_once(source, state))
    ]
    output.print_table("Why not", ["source", "state", "why"], reasons)


def why_not_exactly_once(source: SourceKind, state: StateKind) -> str | None:
    """Return why two kinds do not give exactly once together; None if they do."""
    if exactly_once(source, state):
        return None
    if source == "non-transactional":
        return "the source may lose rows or bring them twice, and nothing after it can notice: at least once at best"
    if state == "non-transactional":
        return "the state does not keep which txid wrote a row, so nothing shows whether a batch is in it already"
    return "a replay may bring other rows, and the state does not keep what it was before the first ones"


def _notes(pipeline: Pipeline) -> Iterator[str]:
    for name, state in pipeline.states.items():
        if why := why_not_exactly_once(pipeline.source.kind, state.kind):
            yield f"state {name} is at least once: {why}"
    for name, condition in pipeline.conditions.items():
        yield f"check {name}: {condition}"
    for query in pipeline.queries:
        if query.is_repeatable:
            yield f"reads {query.of} as the batch before has left it: one batch at a time"
        else:
            yield f"reads {query.of} as of the latest: another attempt at a batch may come to something else"
    yield from pipeline.lost_tracking
    if pipeline.message_timeout_seconds is not None:
        yield f"an attempt may take {pipeline.message_timeout_seconds} s"


def _guarantee(is_exactly_once: bool) -> str:
    return "exactly once" if is_exactly_once else "at least once"


def _poison(pipeline: Pipeline) -> str:
    return f"{pipeline.on_poison}, {output.counted(pipeline.tries, 'try', 'tries')}"


@click.command()
@as_json
def settings(as_json: bool) -> None:
    """Show every setting, its value, where it came from, and the environment variable that sets it.

    So are Airflow's own, where a variable of the environment takes the place of the stack's value.
    """
    from tidegate.stack.components.airflow import airflow_settings, airflow_settings_of_caller  # noqa: PLC0415 - only here

    values, origins = Settings.sources()
    variables = Settings.environment_names()
    rows = [
        {
            "setting": f.name,
            "value": getattr(values, f.name),
            "from": origins[f.name],
            "environment": variables[f.name],
            "help": f.metadata["help"],
        }
        for f in dataclasses.fields(values)
    ]
    ours = airflow_settings()
    rows += [
        {
            "setting": name,
            "value": value,
            "from": "environment",
            "environment": name,
            "help": f"Airflow's; without it: {ours[name]}",
        }
        for name, value in airflow_settings_of_caller().items()
    ]
    if as_json:
        output.print_json(rows)
    else:
        output.print_table("Settings", list(rows[0]), [list(row.values()) for row in rows])


@click.command()
@click.option("--new", metavar="MESSAGE", help="Write the project's migration that the declared states need.")
@click.option(
    "--accept-epoch",
    is_flag=True,
    help="Let pipelines go on after a restore, failover or copy of the database, without the commits that it has lost.",
)
@click.option(
    "--accept-table",
    metavar="STATE",
    multiple=True,
    help="Let batches commit into the state's table as it is, though a type, trigger or rule of it is not as declared.",
)
@click.option(
    "--print-roles", is_flag=True, help="Print the SQL with which an administrator prepares a server; do nothing else."
)
@as_json
def migrate(new: str | None, accept_epoch: bool, accept_table: Sequence[str], print_roles: bool, as_json: bool) -> None:
    """Make the ledger, run the project's migrations and register the pipelines. Safe to repeat."""
    from tidegate import migrations  # noqa: PLC0415 - Alembic takes a while to import, and only this verb needs it

    if print_roles:
        statements = migrations.roles(Settings.load())
        output.print_json({"sql": statements}) if as_json else output.write(statements.removesuffix("\n"))
        return
    if new is not None and (accept_epoch or accept_table):
        raise UsageError("--new only writes a migration: accept a table or what is lost by a command of its own.")
    declared, broken = all_pipelines()
    specs = [pipeline.spec for pipeline in declared]
    if new is not None:
        _write_migration(specs, new, as_json=as_json)
    else:
        _migrate(specs, accept_table, accept_epoch=accept_epoch, as_json=as_json)
        if not (specs or broken or as_json):
            output.say(none_found())
    _refuse(broken)


def _migrate(specs: Sequence[PipelineSpec], accept_table: Sequence[str], *, accept_epoch: bool, as_json: bool) -> None:
    from tidegate import migrations, stack  # noqa: PLC0415

    loaded = Settings.load()
    taken = {state: migrations.accept_table(loaded, state, operator("migrate")) for state in accept_table}
    columns = migrations.column_changes(loaded, specs)
    try:
        revision, changed = migrations.upgrade(loaded, specs)
    except (DeclarationChanged, HoleDetected):
        if accept_epoch:  # the rebuild that is to come first is halted, too; and others than a pipeline that lost a table
            _say_accepted(migrations.accept_epoch(loaded, operator("migrate")), loaded)
        raise
    left_out = migrations.retired(loaded, specs)
    accepted = migrations.accept_epoch(loaded, operator("migrate")) if accept_epoch else {}
    if advice := stack.advice(loaded):
        output.say(advice)
    if as_json:
        accepted = {**accepted, **taken}
        done = {"revision": revision, "changed": changed, "columns": columns, "retired": left_out, "accepted": accepted}
        output.print_json(done)
        return
    output.say(_outcome(revision, changed))
    for sentence in (*taken.values(), *columns, *left_out.values()):
        output.say(sentence)
    if accept_epoch:
        _say_accepted(accepted, loaded)


def _outcome(revision: str | None, changed: Sequence[str]) -> str:
    where = f"at revision {revision} of the project's migrations" if revision else "up to date"
    return f"The database is {where}. Registered: {', '.join(changed) or 'nothing new'}."


def _say_accepted(accepted: Mapping[str, str], settings: Settings) -> None:
    from tidegate.explain import why  # noqa: PLC0415

    for name, outcome in accepted.items():
        output.say(f"{name} {outcome}.")
        with connected(settings) as store:  # a source may be in the server that was promoted
            for sentence in why.refused_next(name, store):
                output.say(sentence)
    if not accepted:
        output.say("No pipeline was halted by a restore, failover or copy that is noticed from here.")


def _write_migration(specs: Sequence[PipelineSpec], message: str, *, as_json: bool) -> None:
    from tidegate import migrations  # noqa: PLC0415

    settings = Settings.load()
    path, columns = migrations.new_revision(settings, specs, message), migrations.column_changes(settings, specs)
    if as_json:
        output.print_json({"written": path, "columns": columns})
        return
    output.say(f"Wrote {path}. Read it, then run: tidegate migrate" if path else "No migration is missing.")
    for sentence in columns:
        output.say(sentence)
