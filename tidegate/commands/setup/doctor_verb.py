"""The verb doctor."""

from dataclasses import asdict

import click

from tidegate import output
from tidegate.commands import as_json
from tidegate.doctor_checks import COMPONENTS, missing, needs_of
from tidegate.state_store.base.settings import Settings


@click.command()
@click.option(
    "--component",
    type=click.Choice(COMPONENTS),
    default="command-line",
    help="What runs here. Run this with the component's own account and environment.",
)
@as_json
def doctor(component: str, as_json: bool) -> None:
    """Check whether a component has here what it needs; a line for each thing that is missing, with what to do.

    Nothing is changed, and no secret is shown. The exit code is 1 if something is missing.
    """
    found = missing(component, Settings.load())
    checked = [need.name for need in needs_of(component)]
    if as_json:
        output.print_json({"component": component, "checked": checked, "missing": [asdict(each) for each in found]})
    else:
        output.write(*(f"{each.need}: {each.problem}" for each in found))
        output.say(f"{component}: {len(found)} missing." if found else f"{component}: nothing is missing.")
    if found:
        raise click.exceptions.Exit(1)
