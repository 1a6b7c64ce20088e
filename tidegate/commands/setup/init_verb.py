"""The verb init: a project of one's own."""

import os
from pathlib import Path

import click

from tidegate import output
from tidegate.commands import as_json
from tidegate.state_store.base import project
from tidegate.state_store.base.errors import UsageError

CHECKOUT = Path(__file__).resolve().parents[3]
FOLDERS = ("pipelines", "dags", "migrations")
FILES = {
    project.SETTINGS_FILE: '# Settings of this project, such as pg_host = "db.internal": `tidegate settings` lists all.\n',
    ".gitignore": f"{project.STACK_FOLDER}/\n__pycache__/\n",
}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), help="The project's folder; it may exist.")
@as_json
def init(folder: Path, as_json: bool) -> None:
    """Make a project of your own: a folder for pipelines, Dags, migrations and settings. What is there stays as it is."""
    home = folder.absolute()
    if home.resolve() == CHECKOUT:
        other = output.to_paste(Path(f"../{home.name}-jobs"))
        raise UsageError(f"{home} is the checkout of Tidegate. Choose another folder: tidegate init {other}")
    try:
        written = _written(home)
    except OSError as error:
        raise UsageError(f"{home} cannot become a project: {error}. Choose another folder.") from error
    if as_json:
        output.print_json({"folder": home, "written": written})
        return
    output.say(f"{home}: {', '.join(written) or 'nothing was missing'}.")
    if (named := os.environ.get(project.HOME_VARIABLE)) and Path(named).resolve() != home.resolve():
        output.say(f"The project is still {named}, which {project.HOME_VARIABLE} names: unset that, or let it name {home}.")
    there = output.to_paste(folder)
    output.say(f"Next: cd {there}, start a stack with `tidegate up`, write a pipeline and its Dag: see docs/projects.md")


def _written(home: Path) -> list[str]:
    """Make what a project lacks; return its names. No other account may write there: what is in a project is run."""
    written = []
    home.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name in FOLDERS:
        if not (home / name).is_dir():
            (home / name).mkdir(mode=0o755)
            written.append(f"{name}/")
    for name, content in FILES.items():
        if not (home / name).exists():
            with open(home / name, "x", opener=lambda path, flags: os.open(path, flags, 0o644)) as file:
                file.write(content)
            written.append(name)
    return written
