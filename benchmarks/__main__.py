"""Runs all benchmarks, or those that are named."""

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks import (
    cardinality,
    cold_start,
    designs,
    fairness,
    growth,
    guard,
    kinds,
    large_state,
    many,
    orchestration,
    page,
    scale,
    trident,
)
from benchmarks.harness import LATEST, Bench, Benchmark, Figure, print_figures, write_latest

BENCHMARKS: dict[str, Benchmark] = {
    "cardinality": cardinality.run,
    "kinds": kinds.run,
    "guard": guard.run,
    "orchestration": orchestration.run,
    "designs": designs.run,
    "growth": growth.run,
    "large_state": large_state.run,
    "cold_start": cold_start.run,
    "page": page.run,
    "trident": trident.run,
    "scale": scale.run,
    "many": many.run,
    "fairness": fairness.run,
}


def main() -> int:
    """Run benchmarks, print the table, store the figures. The exit code does not depend on bars, because machines differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHMARKS)} (all)")
    parser.add_argument("--smoke", action="store_true", help="small sizes, in minutes; tells whether it works, not how fast")
    parser.add_argument("--passes", type=int, default=3, help="how often each way is timed, at most (3)")
    parser.add_argument("--folder", type=Path, help="where data and stacks go (a folder of their own below /tmp)")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - set(BENCHMARKS)):
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    console = Console(width=160)
    figures: list[Figure] = []
    if given.folder:
        given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-", dir=given.folder) as folder:
        for name in given.names or BENCHMARKS:
            bench = Bench(given.smoke, Path(folder) / name, console, given.passes)
            bench.folder.mkdir()
            console.rule(name)
            for figure in BENCHMARKS[name](bench):
                figures.append(figure)
                print_figures(console, [figure])
    console.rule("all")
    print_figures(console, figures)
    if not given.smoke:
        write_latest(figures, LATEST)
    return 0


if __name__ == "__main__":
    sys.exit(main())
