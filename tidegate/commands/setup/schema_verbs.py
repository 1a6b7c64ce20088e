"""The verbs for programs and shells: schema, completion."""

import click
from click.shell_completion import get_completion_class

from tidegate import completion as completing
from tidegate import json_schemas, output
from tidegate.commands import as_json

VARIABLE = "_TIDEGATE_COMPLETE"  # with it, the shell asks for completions


@click.command()
@click.argument(
    "verb", nargs=-1, shell_complete=completing.verbs, help="The verb, such as: quarantine list [default: name all schemas]."
)
@as_json
def schema(verb: tuple[str, ...], as_json: bool) -> None:
    """Print the JSON Schema of what a verb prints with --json. Within a version, fields are added, never renamed or removed."""
    if verb:
        output.print_json(json_schemas.schema(" ".join(verb)))
        return
    addresses = {each: json_schemas.schema(each)["$id"] for each in json_schemas.verbs()}
    if as_json:
        output.print_json(addresses)
    else:
        output.print_table("Schemas", ["verb", "schema"], [list(row) for row in addresses.items()])


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), help="The shell that is to complete.")
@as_json
@click.pass_context
def completion(context: click.Context, shell: str, as_json: bool) -> None:
    """Print the script with which a shell completes verbs, options, pipelines, states, phases and error codes.

    \b
    bash, in ~/.bashrc:  eval "$(tidegate completion bash)"
    zsh, in ~/.zshrc:    eval "$(tidegate completion zsh)"
    fish, once:          tidegate completion fish > ~/.config/fish/completions/tidegate.fish
    """  # noqa: D301 - click takes the character \b for: leave these lines as they are
    made = get_completion_class(shell)
    assert made
    script = made(context.find_root().command, {}, "tidegate", VARIABLE).source()
    if as_json:
        output.print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
