"""The verbs for the embedded stack: up, down, status, backup, restore."""

import time
from dataclasses import asdict
from pathlib import Path

import click

from tidegate import output
from tidegate.commands import AT_LEAST_ONE, as_json, yes
from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.base.settings import Settings
from tidegate.status import status_report


@click.command()
@click.option("--without-airflow", is_flag=True, help="Start Postgres and Spark only.")
@click.option("--with", "extras", type=click.Choice(["kafka"]), multiple=True, help="Start this too, until `down`.")
@click.option("--wait-seconds", metavar="N", type=AT_LEAST_ONE, default=300, help="Longest time to wait for all components.")
@as_json
def up(without_airflow: bool, extras: tuple[str, ...], wait_seconds: int, as_json: bool) -> None:
    """Start Postgres, Spark and Airflow on this machine, and wait until they are well. Safe to repeat."""
    from tidegate import stack  # noqa: PLC0415 - verbs that do not need it start faster

    settings, started = Settings.load(without_stack=True), time.monotonic()
    shown: set[str] = set()

    def watch(statuses: list[stack.ComponentStatus]) -> None:
        for status in statuses:
            if status.state == "up" and status.name not in shown and not as_json:
                output.say(f"{status.name} is up ({time.monotonic() - started:.0f} s)")
                shown.add(status.name)

    statuses = stack.up(
        settings, without_airflow=without_airflow, extras=extras, wait_seconds=wait_seconds, watch=watch, tell=output.say
    )
    _say_advice(stack.advice(settings))
    for warning in stack.warnings(settings):
        output.say(warning)
    if as_json:
        output.print_json([asdict(status) for status in statuses])
        return
    output.print_table(*status_report.components_table(statuses))
    settings = Settings.load()
    if not without_airflow:
        output.say(
            f"Airflow: {settings.airflow_url}, user {settings.airflow_user}, password in {settings.airflow_password_file}"
        )
        output.say(f"The operator's page, for the same user: {status_report.page_address(settings)}")
    if any(status.name == "kafka" for status in statuses):
        output.say(f"Kafka: {settings.kafka_bootstrap}, how to log in is in {settings.kafka_properties_file}")


@click.command()
@click.option("--delete-data", is_flag=True, help="Delete the stack's ledger, states and logs too.")
@click.option("--yes", is_flag=True, help="Confirm --delete-data; without this, exit code 2.")
@as_json
def down(delete_data: bool, yes: bool, as_json: bool) -> None:
    """Stop the stack; data stays in .tidegate. Safe to repeat."""
    from tidegate import stack  # noqa: PLC0415

    settings = Settings.load(without_stack=True)
    if delete_data and not yes:
        raise UsageError(
            f"This would permanently delete {settings.stack_folder} with ledger, states, passwords and logs of all pipelines. "
            "Add --yes to do it."
        )
    ended = stack.down(settings, delete_data=delete_data, tell=output.say)
    message = f"Stopped: {ended} processes ended." if ended else "Nothing was running."
    output.report(message, {"ended_processes": ended}, as_json)


@click.command()
@click.argument("file", type=click.Path(path_type=Path), help="The file to write; it must not exist.")
@as_json
def backup(file: Path, as_json: bool) -> None:
    """Write the embedded stack's ledger and states, as of one moment, into a file; pipelines may run meanwhile."""
    from tidegate.stack import backup as backups  # noqa: PLC0415

    backups.backup(Settings.load(), file)
    message = (
        f"Wrote {file}. The sources' files are not in it. Put it back with: tidegate restore {output.to_paste(file)} --yes"
    )
    output.report(message, {"written": str(file), "bytes": file.stat().st_size}, as_json)


@click.command()
@click.argument("file", type=click.Path(path_type=Path), help="What `tidegate backup` wrote.")
@yes
@as_json
def restore(file: Path, yes: bool, as_json: bool) -> None:
    """Replace the embedded stack's ledger and states by a backup; the old ones are kept under another name."""
    from tidegate.stack import backup as backups  # noqa: PLC0415

    if not yes:
        raise UsageError(
            f"This would put {file} in the place of the ledger and the states of all pipelines, and end all connections to "
            "them. What is there now is kept in another database. Add --yes to do it."
        )
    kept = backups.restore(Settings.load(), file)
    message = (
        f"Restored {file}; what was there before is kept in database {kept}. Pipelines are halted until you have put back "
        "what their sources have moved away since, and have run: tidegate migrate --accept-epoch"
    )
    output.report(message, {"restored": str(file), "kept": kept}, as_json)


@click.command()
@as_json
def status(as_json: bool) -> None:
    """Show the state of the stack and of each pipeline: last committed txid, what is pending, why it waits or is paused.

    Also lag, the age of the oldest batch that is opened and not committed; rows/s of the newest commits within an hour; and how
    many names the sources leave alone.
    """
    settings = Settings.load()
    from tidegate.explain import source_report  # noqa: PLC0415

    found = status_report.look(settings)
    _say_advice(found.advice)
    sources, unread = source_report.of_all(found.lags, settings)
    if as_json:
        output.print_json({**found.facts(), "left_alone": sources, "unread": unread})
    else:
        status_report.show(found, [*sources.values(), *unread.values()])
    if found.trouble is not None:
        raise found.trouble


def _say_advice(advice: str | None) -> None:
    if advice:
        output.say(advice)
