"""Times how soon the operator's page shows data, with 100 pipelines and 100,000 txids in one; beside it Airflow's own lists.

Each time in a browser that has nothing in its cache, from the navigation to the first row of data, as a person sees it. Then
what programs wait for: the rows of many random keys of a large state, by HTTP and in Python.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import httpx
from playwright.sync_api import Browser

from benchmarks.api_server import ApiServer, running_server
from benchmarks.harness import Bar, Bench, Figure, timed
from tests.batches import Batches
from tests.page.browsers import launched
from tests.page.ledgers import PIPELINES, TXIDS, as_owner, write_large_ledger
from tests.page.pipelines import CLICKS
from tests.page.users import token_of
from tidegate.state_store import StateStore
from tidegate.state_store.read_states.state_rows import StateReader

PATIENCE_MS = 60_000
# An address, and what is seen there once its data has come.
VIEWS = {
    "overview of 100 pipelines": ("/tidegate/", "text=large_1"),
    "timeline of 100,000 txids": ("/tidegate/#/pipelines/large_1", "text=cursor is at txid"),
    "one of 100,000 batches": ("/tidegate/#/pipelines/large_1/batches/50000", "text=Frozen when the batch was planned"),
}
DAY = "2026-01-01"
KEYS_AT_ONCE = 1_000
FILL_STATE = """
SELECT set_config('tidegate.writer', 'clicks', true);
INSERT INTO state.per_page (page, day, clicks, spent, txid)
SELECT 'page-' || n, %(day)s, 1, 1, 1 FROM generate_series(0, %(keys)s - 1) AS n;
"""
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
        token = token_of(server.url, "admin")
        runs: dict[str, list[float]] = {name: [] for name in VIEWS}
        beside: list[float] = []
        for number in range(1 + bench.passes):
            for name, (address, shown) in VIEWS.items():
                runs[name].append(_seconds(browser, server, token, address, shown))
            beside.append(_seconds(browser, server, token, *AIRFLOW))
            bench.tell(
                f"pass {number}: {', '.join(f'{name} {of[-1]:.2f}' for name, of in runs.items())}, Airflow {beside[-1]:.2f} s"
            )
        yield from _many_keys(bench, server, token)
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


def _many_keys(bench: Bench, server: ApiServer, token: str) -> Iterator[Figure]:
    """Time requests for the rows of random keys of a state, each request for other ones."""
    size, times = bench.choose(5_000_000, 10_000), bench.choose(21, 3)
    as_owner(server.settings, FILL_STATE, {"keys": size, "day": DAY})
    drawn = random.Random(1)
    requests = [[[f"page-{drawn.randrange(size)}", DAY] for _ in range(KEYS_AT_ONCE)] for _ in range(times)]
    address = "/tidegate/api/pipelines/clicks/states/per_page/rows"
    with (
        httpx.Client(base_url=server.url, cookies={"_token": token}) as http,
        StateReader.open(server.settings, "clicks", "per_page") as reader,
    ):

        def by_http(keys: list[list[str]]) -> None:
            answer = http.post(address, json={"keys": keys})
            assert answer.status_code == 200, answer.text
            assert None not in answer.json()["rows"]

        def in_python(keys: list[list[str]]) -> None:
            assert None not in reader.get_many(keys).rows

        ways: dict[str, Callable[[list[list[str]]], None]] = {"by HTTP": by_http, "in Python": in_python}
        for way, ask in ways.items():
            first, *warm = [timed(partial(ask, keys)) for keys in requests]
            bench.tell(f"{KEYS_AT_ONCE} keys {way}: first {first:.3f} s, then {median(warm):.3f} s")
            what = f"{KEYS_AT_ONCE:,} of {size:,} keys {way}"
            yield Figure("page", what, median(warm), "s", median(warm), bar=Bar(at_most=0.05), runs=warm)


def _seconds(browser: Browser, server: ApiServer, token: str, address: str, shown: str) -> float:
    """Open an address in a new browser; return the seconds from the navigation until this is seen."""
    with browser.new_context() as context:
        context.set_default_timeout(PATIENCE_MS)
        context.add_cookies([{"name": "_token", "value": token, "url": server.url}])
        page = context.new_page()
        page.goto(f"{server.url}{address}", wait_until="commit")
        page.locator(shown).first.wait_for()
        return float(page.evaluate("performance.now()")) / 1000
