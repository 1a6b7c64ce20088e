"""The catalogue of planted faults, a file per room of the product."""

from collections.abc import Sequence
from importlib import import_module

from tests.mutants.planted_fault import Mutant

# Rooms of the protocol first: what they break loses or repeats rows.
PROTOCOL = ("commit", "merge", "schema", "windows", "seal", "attempt", "plan", "history", "operate", "registration", "reads")
OTHERS = ("compute", "sources", "files", "tables", "formats", "airflow", "page", "secrets", "declared", "stack")
ROOMS: dict[str, Sequence[Mutant]] = {name: import_module(f"{__name__}.{name}").MUTANTS for name in (*PROTOCOL, *OTHERS)}
