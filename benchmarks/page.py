"""Times how soon the operator's page shows data, with 100 pipelines and 100,000 txids in one; beside it Airflow's own lists.

Each time in a browser that has nothing in its cache, from the navigation to the first row of data, as a person sees it.
"""

from collections.abc import Iterator
from statistics import median

from playwright.sync_api import Browser

from benchmarks.harness import Bar, Bench, Figure
from state_store import StateStore
from tests.page.browsers import launched
from tests.page.conftest import Server, running_server, token_of
from tests.page.ledgers import PIPELINES, TXIDS, Batches, write_large_ledger
from tests.page.pipelines import CLICKS

PATIENCE_MS = 60_000
# An address, and what is seen there once its data has come.
VIEWS = {
    "overview of 100 pipelines": ("/tidegate/", "text=large_1"),
    "timeline of 100,000 txids": ("/tidegate/#/pipelines/large_1", "text=cursor is at txid"),
    "one of 100,000 batches": ("/tidegate/#/pipelines/large_1/batches/50000", "text=Frozen when the batch was planned"),
    "history of 100,000 commits": ("/tidegate/#/pipelines/large_1/history?days=1", "text=source rows that committed"),
}
AIRFLOW = ("/dags", "text=No Dags found")


def run(bench: Bench) -> Iterator[Figure]:
    """Time the page's views and Airflow's list of Dags, which is empty here, in turn."""
    home = bench.folder / "server"
    home.mkdir(parents=True)
    with running_server(home) as server, launched() as browser:
        with StateStore.connect(server.settings) as store:
            batches = Batches(store, CLICKS)
            batches.plan("a run", 1)
            batches.seal(1)
            batches.commit(1)
        write_large_ledger(server.settings, bench.choose(PIPELINES, 3), bench.choose(TXIDS, 60_000))
        token = token_of(server, "admin")
        runs: dict[str, list[float]] = {name: [] for name in VIEWS}
        beside: list[float] = []
        for number in range(1 + bench.passes):
            for name, (address, shown) in VIEWS.items():
                runs[name].append(_seconds(browser, server, token, address, shown))
            beside.append(_seconds(browser, server, token, *AIRFLOW))
            bench.tell(
                f"pass {number}: {', '.join(f'{name} {of[-1]:.2f}' for name, of in runs.items())}, Airflow {beside[-1]:.2f} s"
            )
    for name, of in runs.items():
        first, *warm = of
        yield Figure(
            "page",
            name,
            median(warm),
            "s",
            median(warm),
            "Airflow's list of Dags",
            median(beside[1:]),
            Bar(at_most=1),
            warm,
            beside,
        )
        yield Figure("page", f"{name}, the first after the server's start", first, "s", first)


def _seconds(browser: Browser, server: Server, token: str, address: str, shown: str) -> float:
    """Open an address in a new browser; return the seconds from the navigation until this is seen."""
    with browser.new_context() as context:
        context.set_default_timeout(PATIENCE_MS)
        context.add_cookies([{"name": "_token", "value": token, "url": server.url}])
        page = context.new_page()
        page.goto(f"{server.url}{address}", wait_until="commit")
        page.locator(shown).first.wait_for()
        return float(page.evaluate("performance.now()")) / 1000
