"""The supervisor of a test's stack: as the usual one, but its Postgres has few buffers and never syncs.

Postgres looks through all buffers, a quarter of the machine's memory, whenever a table is dropped: after each commit and test.
Killed processes lose nothing by a lack of syncing, only machines do.
"""

import runpy
from dataclasses import replace

from tidegate.stack.components.postgres import EmbeddedPostgres
from tidegate.stack.components.server_process import Component

USUAL = "tidegate.stack.supervisor"
OPTIONS = ["-c", "shared_buffers=128MB", "-c", "fsync=off", "-c", "full_page_writes=off"]
_usual = EmbeddedPostgres.component


def component(postgres: EmbeddedPostgres) -> Component:
    usual = _usual(postgres)
    return replace(usual, command=[*usual.command, *OPTIONS])


if __name__ == "__main__":
    EmbeddedPostgres.component = component  # type: ignore[method-assign]
    runpy.run_module(USUAL, run_name="__main__")
