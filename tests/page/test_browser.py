"""The page in a real browser, on a whole stack: an operator's walk, what others may do, how it looks and reads.

`make pictures` runs it to renew the pictures in docs/page.
"""

import csv
import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from tests.end_to_end.conftest import Project, project, wait_for  # noqa: F401 - project is a fixture
from tests.page.browsers import launched, needs_chromium

pytestmark = needs_chromium

PICTURES = Path(__file__).resolve().parents[2] / "docs/page"
USERS = "admin:admin,viewer:viewer"
IS_KEEPING = bool(os.environ.get("PICTURES"))
PATIENCE_MS = 120_000
expect.set_options(timeout=PATIENCE_MS)
COMMITTED, COMMITS, WAITS, CHANGED, STUCK = 4, 5, 6, 7, 8  # txids of flights
NASTY = 'back from "backup" <img src=x onerror=document.title="XSS"> \u202e\u05e9\u05dc\u05d5\u05dd\u202c 🦀'
SIZES = {"narrow": {"width": 390, "height": 844}, "wide": {"width": 1440, "height": 900}}
VIEWS = {
    "overview": "",
    "timeline": "pipelines/flights",
    "timeline_as_table": "pipelines/flights/timeline?as=table",
    "batches": "pipelines/flights/batches",
    "batch": f"pipelines/flights/batches/{CHANGED}",
    "states": "pipelines/flights/states/daily",
    "history": "pipelines/flights/history?days=1",
    "quarantine": "pipelines/flights/quarantine",
    "actions": "pipelines/flights/actions",
    "unknown": "nowhere",
}
KEPT = {"overview", "timeline", "batch"}
# What a view shows once its data is there.
SHOWN = {
    "overview": "pipelines? needs? a person",
    "timeline": "cursor is at txid",
    "timeline_as_table": "timeline of flights in figures",
    "batches": "waits for",
    "batch": "Frozen when the batch was planned",
    "states": "one row per carrier, date",
    "history": "source rows that committed",
    "quarantine": "Quarantine is empty",
    "actions": "About the pipeline",
    "unknown": "names no view",
}


@pytest.fixture(scope="module")
def two_users() -> Iterator[None]:
    """Airflow gets a user besides the administrator, who may only read."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS", USERS)
        yield


@pytest.fixture(scope="module")
def stack(two_users: None, project: Project) -> Project:  # noqa: F811 - the fixture
    """A stack on which flights has committed four batches."""
    assert project.json("trigger", "flights", "--wait")["committed"] == [1, 2, 3, 4]
    assert project.json("trigger", "word_count", "--wait")["state"] == "success"
    return project


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser."""
    with launched() as started:
        yield started


class Visit:
    """A user who is logged in, and the pages that they open."""

    def __init__(self, browser: Browser, stack: Project, name: str) -> None:
        self._browser = browser
        self.url = stack.settings.airflow_url
        passwords = json.loads((stack.settings.stack_folder / "secrets/airflow_passwords.json").read_text())
        with self._browser.new_context() as context:
            page = context.new_page()
            page.goto(f"{self.url}/tidegate/")  # leads to Airflow's login, and back
            page.locator("input[name=username]").fill(name, timeout=PATIENCE_MS)
            page.locator("input[name=password]").fill(passwords[name])
            page.keyboard.press("Enter")
            page.wait_for_url(f"{self.url}/tidegate/", timeout=PATIENCE_MS)
            expect(page.get_by_role("heading", level=1)).to_have_text("Pipelines")
            self.login = context.storage_state()

    @contextmanager
    def page(self, view: str | None = "", size: str = "wide", scheme: Any = "light", path: str = "") -> Iterator[Page]:
        """Open a view of the page, or a path of Airflow; nothing may go wrong in the browser."""
        errors: list[str] = []
        context = self._browser.new_context(storage_state=self.login, viewport=SIZES[size], color_scheme=scheme)  # type: ignore[arg-type]
        context.set_default_timeout(PATIENCE_MS)
        with context:
            page = context.new_page()
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(f"{self.url}{path}" if path else f"{self.url}/tidegate/#/{view}")
            yield page
        assert errors == []


@pytest.fixture(scope="module")
def operator(browser: Browser, stack: Project) -> Visit:
    """The administrator."""
    return Visit(browser, stack, "admin")


@pytest.fixture(scope="module")
def viewer(browser: Browser, stack: Project) -> Visit:
    """A user who may only read."""
    return Visit(browser, stack, "viewer")


class Trouble:
    """A run that stands still: txid 5 commits, 6 waits for it, 7 has failed, because its file changed, and 8 waits for 7."""

    def __init__(self, stack: Project) -> None:
        self._stack = stack
        self._held = ExitStack()
        assert stack.next_flights(4) == [COMMITS, WAITS, CHANGED, STUCK]
        with stack.held("attempt"):
            self.run_id = stack.json("trigger", "flights")["run_id"]
            wait_for(lambda: self.phases() == ["planned"] * 4, "the plan")
            batch = stack.json("inspect", "flights", "--txid", str(CHANGED))
            self.file = stack.home / "data/flights" / batch["source_metadata"]["files"][0]["name"]
            self._content = self.file.read_bytes()
            self.file.write_bytes(self._content + self._content.splitlines(keepends=True)[-1])
            self._held.enter_context(stack.held("commit"))
        wait_for(lambda: self.phases() == ["processed", "processed", "halted", "processed"], "processing")

    def phases(self) -> list[str]:
        """Return the phases of its batches."""
        return [b["phase"] for b in self._stack.json("inspect", "flights") if b["txid"] > COMMITTED]

    def let_commit(self) -> None:
        """Let what can commit do so, and the run end, failed."""
        self._held.close()
        wait_for(lambda: self._stack.airflow().run_state("flights", self.run_id) == "failed", "the end of the run", 240)

    def put_back(self) -> None:
        """Mend the source."""
        self.file.write_bytes(self._content)


@pytest.fixture(scope="module")
def trouble(stack: Project) -> Iterator[Trouble]:
    """A batch that needs a person; its run stands still until `let_commit`."""
    made = Trouble(stack)
    yield made
    made.let_commit()


def keep(page: Page, name: str) -> None:
    """Renew a picture of the documentation, if that is wanted."""
    if IS_KEEPING:
        page.mouse.move(0, 0)
        page.wait_for_timeout(1000)  # Airflow's panels slide in
        PICTURES.mkdir(exist_ok=True)
        taken = Image.open(BytesIO(page.screenshot())).convert("RGB")
        taken.quantize(colors=128, dither=Image.Dither.NONE).save(PICTURES / f"{name}.png", optimize=True)


def dialog_of(page: Page, button: str) -> Any:
    """Press a button and return the dialog that it opens."""
    page.get_by_role("button", name=button, exact=True).first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    return dialog


def test_airflow_shows_which_txid_failed_and_which_waits(stack: Project, trouble: Trouble, operator: Visit) -> None:
    """In the run's own grid: process of txid 7 is red, commit of txid 6 waits."""

    def states() -> dict[tuple[str, str], str]:
        tasks = stack.airflow().task_instances("flights", trouble.run_id)
        return {(t["task_id"].split(".")[-1], t["rendered_map_index"]): t["state"] for t in tasks if t["map_index"] >= 0}

    wait_for(lambda: states()["commit", f"txid {WAITS}"] == "deferred", "the wait for its turn")
    assert states()["process", f"txid {CHANGED}"] == "failed"
    assert states()["process", f"txid {WAITS}"] == "success"
    with operator.page(path=f"/dags/flights/runs/{trouble.run_id}") as page:
        expect(page.get_by_text(f"txid {WAITS}").first).to_be_visible()
        if IS_KEEPING:
            page.get_by_role("button", name="Expand all task groups").click()
            keep(page, "airflow-grid")
            page.get_by_role("button", name=re.compile("^Show Graph")).click()
            keep(page, "airflow-graph")


def test_an_operator_sees_what_waits_and_why(trouble: Trouble, operator: Visit) -> None:
    """From the overview to the batch, by following links."""
    trouble.let_commit()
    with operator.page() as page:
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name="flights", exact=True))
        expect(row).to_contain_text("2 txids")
        expect(row).to_contain_text(f"txid {WAITS}")
        expect(row.get_by_role("link", name="SOURCE_CHANGED")).to_be_visible()
        expect(page.get_by_text("1 pipeline needs a person")).to_be_visible()

        row.get_by_role("link", name="flights", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("flights")
        page.get_by_role("link", name=re.compile(f"^txid {CHANGED}, failed after .*SOURCE_CHANGED")).click()

        expect(page.get_by_role("heading", level=1)).to_contain_text("halted")
        expect(page.locator(".why-chain")).to_contain_text("SOURCE_CHANGED")
        expect(page.get_by_role("table", name=re.compile("^files"))).to_contain_text(trouble.file.name)
        expect(page.get_by_role("link", name="Dag run in Airflow")).to_have_attribute("href", re.compile(trouble.run_id[:10]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_every_view_is_accessible_and_fits(trouble: Trouble, operator: Visit, size: str, scheme: str) -> None:
    """Axe finds nothing serious, and the page never scrolls sideways."""
    problems: dict[str, list[str]] = {}
    for name, view in VIEWS.items():
        with operator.page(view, size, scheme) as page:
            expect(page.get_by_text(re.compile(SHOWN[name], re.IGNORECASE)).first).to_be_visible()
            if name == "batch":
                dialog_of(page, f"Retry txid {CHANGED}").get_by_role("textbox").wait_for()
                problems[f"{name}: dialog"] = serious(page)
                page.keyboard.press("Escape")
            problems[name] = serious(page)
            if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                problems[name].append("it scrolls sideways")
            if name in KEPT:
                keep(page, f"{name}-{size}-{scheme}")

    assert {name: found for name, found in problems.items() if found} == {}


def serious(page: Page) -> list[str]:
    """Return what axe finds that keeps people from using the page."""
    violations = Axe().run(page).response["violations"]
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def test_a_reader_is_offered_no_action_and_refused_one(stack: Project, trouble: Trouble, viewer: Visit) -> None:
    """The viewer reads why and how, and neither a button nor the server lets them act."""
    before = stack.json("inspect", "flights", "--txid", str(CHANGED))["actions"]
    with viewer.page(f"pipelines/flights/batches/{CHANGED}") as page:
        expect(page.locator(".why-chain")).to_contain_text("SOURCE_CHANGED")
        expect(page.get_by_text(f"tidegate retry flights {CHANGED}").first).to_be_visible()
        buttons = page.get_by_role("button").all_inner_texts()
        assert [text for text in buttons if text not in ("live", "copy")] == []

        answer = page.evaluate(
            """async (where) => (await fetch(where, {method: 'POST', body: JSON.stringify({txid: 7, reason: 'mine'}),
               headers: {'Content-Type': 'application/json', 'X-Tidegate-Action': '1'}})).status""",
            "api/pipelines/flights/actions/retry",
        )
    assert answer == 403
    assert stack.json("inspect", "flights", "--txid", str(CHANGED))["actions"] == before


def test_without_a_login_nothing_is_shown(browser: Browser, stack: Project) -> None:
    """The page leads to Airflow's login; its API says 401."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{stack.settings.airflow_url}/tidegate/")
        assert "/auth/login" in page.url
        assert context.request.get(f"{stack.settings.airflow_url}/tidegate/api/pipelines").status == 401


def test_a_dialog_outlives_a_login_that_ends(trouble: Trouble, operator: Visit) -> None:
    """What was typed stays, and is sent when the operator is logged in again."""
    with operator.page("pipelines/word_count") as page:
        dialog = dialog_of(page, "Pause")
        dialog.get_by_role("textbox").fill("the database is upgraded")
        cookies = page.context.cookies()
        page.context.clear_cookies()
        dialog.get_by_role("button", name="Pause", exact=True).click()
        expect(dialog.get_by_role("alert")).to_contain_text("Log in again")
        expect(dialog.get_by_role("textbox")).to_have_value("the database is upgraded")

        page.context.add_cookies(cookies)  # type: ignore[arg-type]
        dialog.get_by_role("button", name="Pause", exact=True).click()
        expect(dialog).to_contain_text("word_count is paused")
        dialog.get_by_role("button", name="Close").click()
        expect(page.get_by_role("button", name="Resume", exact=True).first).to_be_visible()


def test_an_action_needs_no_mouse(stack: Project, trouble: Trouble, operator: Visit) -> None:
    """By Tab, Enter and typing alone; the dialog holds the focus and gives it back."""
    with operator.page("pipelines/word_count") as page:
        expect(page.get_by_role("button", name="Resume", exact=True).first).to_be_visible()
        page.keyboard.press("Tab")
        assert focused(page) == "Skip to the content"
        tab_to(page, "Resume")
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_role("textbox")).to_be_focused()
        page.keyboard.type("upgraded")
        for _ in range(12):  # round and round, never out of the dialog (except to the browser's own controls)
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
        tab_to(page, "Resume")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("word_count")
        expect(dialog.get_by_role("button", name="Close")).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        page.wait_for_function("document.activeElement !== document.body")  # given back after the next drawing

    assert not next(p for p in stack.json("status")["pipelines"] if p["pipeline"] == "word_count").get("paused_at")


def focused(page: Page) -> str:
    """Return the text of what has the focus."""
    return str(page.evaluate("document.activeElement.textContent.trim()"))


def tab_to(page: Page, text: str) -> None:
    """Press Tab until this has the focus."""
    for _ in range(60):
        if focused(page) == text:
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not lead to {text}")


def test_it_says_when_the_server_is_away_and_recovers(trouble: Trouble, operator: Visit) -> None:
    """The old answer stays, with the focus where it was."""
    with operator.page("pipelines/flights") as page:
        link = page.get_by_role("link", name=re.compile("^txid 3, "))
        link.focus()
        page.context.set_offline(True)
        expect(page.get_by_role("alert")).to_contain_text("The server does not answer")
        expect(page.get_by_text("stale")).to_be_visible()
        expect(link).to_be_focused()
        page.context.set_offline(False)
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(link).to_be_focused()


def test_mended_and_retried_it_commits_before_the_operators_eyes(stack: Project, trouble: Trouble, operator: Visit) -> None:
    """Put the file back, retry with a reason, watch; the page is not loaded again, and a double click acts once."""
    trouble.let_commit()
    trouble.put_back()
    with operator.page(f"pipelines/flights/batches/{CHANGED}") as page:
        page.evaluate("window.loadedOnce = true")
        sent: list[str] = []
        page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
        dialog = dialog_of(page, f"Retry txid {CHANGED}")
        expect(dialog).to_contain_text("may be tried again")
        dialog.get_by_role("textbox").fill(NASTY)
        dialog.get_by_role("button", name=f"Retry txid {CHANGED}", exact=True).dblclick()
        expect(dialog).to_contain_text("Airflow has started the run")
        page.keyboard.press("Escape")
        assert [url.rsplit("/", 1)[1] for url in sent] == ["retry", "dagRuns"]

        expect(page.get_by_role("heading", level=1)).to_contain_text("committed")
        expect(page.get_by_role("table", name=f"What operators did with txid {CHANGED}")).to_contain_text(NASTY)
        assert page.evaluate("window.loadedOnce")
        assert page.title() == f"{CHANGED} · batches · flights · Tidegate"  # and not what the reason says

        page.get_by_role("link", name=f"txid {STUCK} →").click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("committed")
    assert stack.flights() == stack.flights_from_raw_files()


def test_a_key_is_found_and_all_of_a_state_downloaded(stack: Project, trouble: Trouble, operator: Visit) -> None:
    """The row and the file hold what SQL says."""
    with stack.as_administrator() as connection, connection.cursor() as cursor:
        cursor.execute("SELECT * FROM state.daily ORDER BY carrier, date")
        names = [column.name for column in cursor.description or ()]
        rows = [["" if value is None else str(value) for value in row] for row in cursor.fetchall()]
    with operator.page("pipelines/flights/states/daily") as page:
        page.get_by_label("carrier").fill("UA")
        page.get_by_label("date").fill("2013-01-01")
        page.get_by_role("button", name="Find").click()
        expect(page.get_by_role("table").get_by_role("row")).to_have_count(2)
        found = page.get_by_role("row").last.locator("th, td").all_inner_texts()

        page.get_by_role("link", name="all rows").click()
        with page.expect_download() as started:
            page.get_by_role("link", name="Download CSV").click()
        with started.value.path().open(newline="", encoding="utf-8") as file:
            header, *downloaded = list(csv.reader(file))

    by_name = dict(zip(header, next(row for row in downloaded if row[:2] == ["UA", "2013-01-01"]), strict=True))
    assert found == [by_name[name] for name in header]
    order = [names.index(name) for name in header]
    assert sorted(downloaded) == sorted([row[place] for place in order] for row in rows)


def test_it_works_inside_airflows_frame(stack: Project, trouble: Trouble, operator: Visit) -> None:
    """In the menu, and as a tab of the Dag; a link leads out of the frame."""
    with operator.page(path="/plugin/tidegate") as page:
        frame = page.frame_locator("iframe")
        expect(frame.get_by_role("heading", level=1)).to_have_text("Pipelines")
        keep(page, "inside-airflow")
    with operator.page(path="/dags/flights/plugin/tidegate-pipeline") as page:
        frame = page.frame_locator("iframe")
        expect(frame.get_by_role("heading", level=1)).to_contain_text("flights")
        frame.get_by_role("link", name="full page").click()
        page.wait_for_url(re.compile(r"/tidegate/#/pipelines/flights"))


def test_a_run_whose_plan_fails_is_seen_and_mended_on_the_page(stack: Project, operator: Visit) -> None:
    """Its pipeline looks idle nowhere: not in the list, nor alone, until the next run, which the button starts."""
    folder = stack.home / "data/word_count"
    folder.rename(folder.with_name("away"))
    failed = stack.tidegate("trigger", "word_count", "--wait", exit_code=1).stderr
    assert "failed in plan (1). word_count waits for a plan that succeeds: SOURCE_UNREADABLE: The source folder" in failed
    run_id = re.search(r"Dag run (manual__\S+) failed", failed)
    assert run_id is not None
    with operator.page() as page:
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name="word_count", exact=True))
        expect(row).to_contain_text(f"Planning has failed ({run_id[1]}): SOURCE_UNREADABLE: The source folder")
        expect(row.get_by_role("link", name="SOURCE_UNREADABLE")).to_be_visible()
        expect(row).to_contain_text("needs a person")
        row.get_by_role("link", name="word_count", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("word_count")
        expect(page.locator(".why-chain")).to_contain_text("Planning has failed")
        expect(page.locator(".why-chain")).not_to_contain_text("Nothing to do")

        folder.with_name("away").rename(folder)
        dialog = dialog_of(page, "Run now")
        dialog.get_by_role("button", name="Run now", exact=True).click()
        expect(dialog).to_contain_text("Airflow has started the run")
        page.keyboard.press("Escape")
        expect(page.locator(".why-chain")).to_contain_text("Nothing to do")
