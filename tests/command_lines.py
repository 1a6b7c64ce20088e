"""Checks command lines that documents and advice show, against the command line as it is."""

import shlex

import click

from tidegate.cli import app


def check(line: str) -> click.Command:
    """Parse a whole command line of `tidegate` without running it; fail on an unknown verb, option or a missing argument."""
    command, arguments = _resolve(line)
    try:
        command.make_context(command.name, list(arguments)).close()
    except click.exceptions.Exit:
        assert "--help" in arguments
    return command


def check_mentioned(line: str) -> None:
    """Check a command that prose mentions, perhaps without its arguments: the verb and its options exist."""
    command, arguments = _resolve(line)
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    assert {word.partition("=")[0] for word in arguments if word.startswith("--")} <= known, line


def _resolve(line: str) -> tuple[click.Command, list[str]]:
    program, *words = shlex.split(line)
    assert program == "tidegate", line
    command: click.Command = app
    while isinstance(command, click.Group) and words:
        name = words.pop(0)
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"{line}: there is no verb {name}"
        command = found
    return command, words
