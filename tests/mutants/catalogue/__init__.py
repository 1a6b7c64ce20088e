"""The catalogue of planted faults, a file per room of the product."""

from collections.abc import Sequence

from tests.mutants.catalogue import (
    airflow,
    attempt,
    commit,
    compute,
    declared,
    files,
    formats,
    history,
    merge,
    operate,
    page,
    plan,
    reads,
    registration,
    schema,
    seal,
    secrets,
    sources,
    stack,
    tables,
    windows,
)
from tests.mutants.planted_fault import Mutant

# Rooms of the protocol first: what they break loses or repeats rows.
PROTOCOL = ("commit", "merge", "schema", "windows", "seal", "attempt", "plan", "history", "operate", "registration", "reads")
ROOMS: dict[str, Sequence[Mutant]] = {
    "commit": commit.MUTANTS,
    "merge": merge.MUTANTS,
    "schema": schema.MUTANTS,
    "windows": windows.MUTANTS,
    "seal": seal.MUTANTS,
    "attempt": attempt.MUTANTS,
    "plan": plan.MUTANTS,
    "history": history.MUTANTS,
    "operate": operate.MUTANTS,
    "registration": registration.MUTANTS,
    "reads": reads.MUTANTS,
    "compute": compute.MUTANTS,
    "sources": sources.MUTANTS,
    "files": files.MUTANTS,
    "tables": tables.MUTANTS,
    "formats": formats.MUTANTS,
    "airflow": airflow.MUTANTS,
    "page": page.MUTANTS,
    "secrets": secrets.MUTANTS,
    "declared": declared.MUTANTS,
    "stack": stack.MUTANTS,
}
