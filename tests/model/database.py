"""A Postgres of the model's own, with the ledger: it needs no Spark, so that it is there in seconds."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tests.model.actors import Actors, scripted
from tests.postgres_versions import AnyPostgres, running
from tidegate import migrations
from tidegate.stack.components.server_process import reserve_port


@contextmanager
def running_actors() -> Iterator[Actors]:
    """Run a server with a migrated database, and actors on it whose statements follow their scripts."""
    home = Path(tempfile.mkdtemp(prefix="tidegate-model-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    home.chmod(0o711)
    try:
        with ExitStack() as held:
            postgres = AnyPostgres(home, reserve_port(None, held), max_connections="60", synchronous_commit="off")
            with running(postgres):
                settings = replace(postgres.settings, witness_folder=home / "witness")
                migrations.upgrade(settings, [])
                actors = Actors(settings)
                try:
                    with scripted():
                        yield actors
                finally:
                    actors.close()
    finally:
        shutil.rmtree(home, ignore_errors=True)
