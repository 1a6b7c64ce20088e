"""Pipelines, settings and migrations."""

import dataclasses
from typing import Annotated, Any

import typer

from jobs.registry import all_pipelines
from state_store.settings import Settings
from tidegate import output
from tidegate.commands import AsJson


def pipelines(as_json: AsJson = False) -> None:
    """List the declared pipelines: source, states, and what they guarantee."""
    rows: list[dict[str, Any]] = [
        {
            "pipeline": p.name,
            "source": f"{p.source.kind} {type(p.source).__name__}",
            "states": {name: {"key": list(state.key), "values": list(state.aggregates)} for name, state in p.states.items()},
            "guarantee": "exactly once",
            "window": p.window,
            "description": p.description,
        }
        for p in all_pipelines()
    ]
    if as_json:
        output.print_json(rows)
        return
    table = [
        [
            row["pipeline"],
            row["source"],
            "\n".join(
                f"{name} by {', '.join(state['key'])}: {', '.join(state['values'])}" for name, state in row["states"].items()
            ),
            row["guarantee"],
            row["window"],
        ]
        for row in rows
    ]
    output.print_table("Pipelines", ["pipeline", "source", "states", "guarantee", "window"], table)


def settings(as_json: AsJson = False) -> None:
    """Show every setting, its value, where it came from, and the environment variable that sets it."""
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
    if as_json:
        output.print_json(rows)
    else:
        output.print_table("Settings", list(rows[0]), [list(row.values()) for row in rows])


def migrate(
    new: Annotated[
        str | None, typer.Option(metavar="MESSAGE", help="Write the migration that the declared states need.")
    ] = None,
    accept_epoch: Annotated[
        bool, typer.Option(help="Let pipelines go on after a restore, failover or copy of the database.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring the database to this code's revision and register the pipelines. Safe to repeat."""
    import migrations  # noqa: PLC0415 - Alembic takes a while to import, and only this verb needs it

    specs = [pipeline.spec for pipeline in all_pipelines()]
    if new is not None:
        path = migrations.new_revision(Settings.load(), specs, new)
        output.print_json({"written": path}) if as_json else output.say(
            f"Wrote {path}. Read it, then run: tidegate migrate" if path else "No migration is missing."
        )
        return
    revision, changed = migrations.upgrade(Settings.load(), specs, accept_epoch=accept_epoch)
    if as_json:
        output.print_json({"revision": revision, "changed": changed})
    else:
        output.say(f"The database is at revision {revision}. Registered: {', '.join(changed) or 'nothing new'}.")


COMMANDS = (pipelines, settings, migrate)
