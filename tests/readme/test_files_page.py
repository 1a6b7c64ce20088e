"""The page docs/files.md: its example runs as it stands, and it names every argument and every option."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.readme.pages import DOCUMENTS, dicts, examples
from tidegate.jobs import Files
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.jobs.sources.files.formats.text_files.text_options import KNOWN
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import MalformedRecord

SALES = [
    ("pt", "Lisbon", 1250, "05.11.2026 09:30"),
    ("pt", "Porto", 990, "05.11.2026 23:59"),
    ("es", "Vigo", 5, "06.11.2026 08:00"),
]


def write(folder: Path, *, header: bool) -> None:
    """Write the sales, a file per country."""
    for country in {sale[0] for sale in SALES}:
        file = folder / f"country={country}" / "sales.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = ["till;shop;cents;sold_at"] if header else []
        for _, shop, cents, sold_at in (sale for sale in SALES if sale[0] == country):
            lines.append(f"7;{shop};{cents};{sold_at}" if header else f"{shop};{cents};{sold_at}")
        lines.append("7;NA;1;05.11.2026 10:00" if header else "NA;1;05.11.2026 10:00")
        file.write_text("\n".join(lines) + "\n")


@pytest.mark.soak
@pytest.mark.parametrize("header", [True, False])
def test_the_example_reads_files_with_and_without_a_header(
    settings: Settings, register: Callable[..., None], header: bool
) -> None:
    """By its names, of which the schema may leave some out; or by the order of the schema."""
    (declared,) = examples("files.md").values()
    assert isinstance(declared.source, Files)
    null_keys = {name: replace(state, null_keys=True) for name, state in declared.states.items()}
    pipeline = replace(declared, source=replace(declared.source, header=header), states=null_keys)
    register(pipeline)
    write(settings.home / "data" / "tills", header=header)
    run_pipeline(settings, pipeline, run_id="run")
    expected = {(country, shop): cents for country, shop, cents, _ in SALES} | {("pt", None): 1, ("es", None): 1}
    found = {(row["country"], row["shop"]): row["cents"] for row in dicts(settings, pipeline, None)}
    assert found == expected


def test_a_file_without_a_header_is_refused_with_the_way_out(settings: Settings, register: Callable[..., None]) -> None:
    """As the page says it."""
    (pipeline,) = examples("files.md").values()
    register(pipeline)
    write(settings.home / "data" / "tills", header=False)
    with pytest.raises(MalformedRecord, match="say header=False if the file has none"):
        run_pipeline(settings, pipeline, run_id="run")


def table(section: str) -> list[list[str]]:
    """Return the cells of a section's table, without its head."""
    text = (DOCUMENTS / "files.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_page_names_every_argument_and_every_option() -> None:
    """And no others; options with the formats that take them."""
    names = [name for row in table("What may be declared") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(names) == sorted(field.name for field in fields(Files))
    options = {name.lower(): row[1].split(", ") for row in table("Options of text") for name in re.findall(r"`(\w+)`", row[0])}
    for kind, known in KNOWN.items():
        assert set(known) == {name for name, formats in options.items() if kind in formats}, kind
