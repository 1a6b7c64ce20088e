"""Plans once over a store, in a process of its own, and prints what that took: arguments are a JSON object.

`folder`, `names_grow`, `after` (the last name taken), `batches`, and `database` for the ledger's record of what has counted.
"""

import json
import resource
import sys
import time
from dataclasses import replace
from typing import Any

from tidegate.jobs import Files
from tidegate.jobs.engine.planning import LedgerHistory
from tidegate.jobs.sources.binding import coordinator_of
from tidegate.state_store import Settings, StateStore


def main(arguments: dict[str, Any]) -> None:
    """Plan, and print the number of objects, the seconds, and the growth of the process in MB."""
    source = Files(arguments["folder"], schema={"name": "string"}, max_files=100, names_grow=arguments.get("names_grow", False))
    settings = Settings.load()
    coordinator = coordinator_of(source, settings)
    previous = {"files": [], "behind": None, "after": arguments["after"]} if arguments.get("after") else None
    if arguments.get("database"):
        store = StateStore.connect(replace(settings, pg_database=arguments["database"])).__enter__()
        coordinator.look_back(LedgerHistory(store, "many"))
    import obstore  # noqa: F401, PLC0415 - its own size is no growth

    before, started, count = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic(), 0
    for txid in range(2, arguments["batches"] + 2):
        previous = coordinator.initialize_transaction(txid, previous, None)
        if previous is None:
            break
        count += len(previous["files"])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    seconds = time.monotonic() - started
    sys.stdout.write(json.dumps({"objects": count, "seconds": round(seconds, 3), "grown_mb": round(grown, 1)}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
