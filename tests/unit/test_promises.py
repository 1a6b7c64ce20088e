"""The register of promises: nothing leaves it, and nothing comes into it, unseen."""

import re
from collections import Counter

from tests import promises


def test_what_lacks_a_test_or_a_promise_is_named() -> None:
    found = {name: promises.Promise("it is kept") for name in ("I4", "I5", "limit:WINDOW", "error:TOO_MUCH")}
    marks = [("one", "I4"), ("two (soak)", "I5"), ("three", "error:*"), ("four", "limit:WIDTH")]
    assert promises.hold(found, marks) == ["four is marked with limit:WIDTH, which is no promise."]
    assert [said.partition(":")[0] for said in promises.compare(found)] == [
        "limit",
        "error",
        "I5 is an invariant, and only make soak tests it",
    ]


def test_no_line_of_a_source_is_left_out() -> None:
    def found(file: str, pattern: str) -> int:
        return len(re.findall(pattern, (promises.ROOT / file).read_text(), re.MULTILINE))

    counts = Counter(promises.kind_of(each) for each in promises.promises(promises.ROOT))
    assert counts["invariant"] == found("docs/protocol.md", r"^- \*\*I\d+ ")
    assert counts["limit"] == found("docs/limits.md", r"^\| (?!limit \|)")
    assert counts["error"] == len(list((promises.ROOT / "docs/errors").glob("*.md"))) - 1  # README.md
    assert counts["json"] == len(list((promises.ROOT / "docs/json").glob("*.json")))
    assert counts["security"] == found("SECURITY.md", r"^\| (?!Attacker)")
    others = "shortcut|design|one record|one batch|pipelined"
    assert counts["performance"] == found("docs/performance.md", rf"^\| (?!{others}).*\|$")
    faults = (promises.ROOT / "docs/protocol.md").read_text().partition("## Faults")[2].partition("Each is tested")[0]
    rows = [line.split("|")[2:5] for line in faults.splitlines() if line.startswith("|")][2:]
    assert counts["fault"] == sum(bool(cell.strip()) for row in rows for cell in row)
