"""What Airflow's facts mean for a pipeline that waits; tests/end_to_end asks a real Airflow."""

from dataclasses import replace
from typing import Any

import pytest

from tidegate.explain.airflow_report import BUSY_SECONDS, Facts, causes_of

FACTS = Facts({"dag_run_id": "manual__1", "state": "running"}, None, None, 1.0, "healthy", {}, 3, 2000)
PAGE = "http://127.0.0.1:8080/dags/orders"


def pool(slots: int, open_slots: int = 0, *, include_deferred: bool = False) -> dict[str, Any]:
    return {"pools": {"small": {"slots": slots, "open_slots": open_slots, "include_deferred": include_deferred}}}


@pytest.mark.parametrize(
    ("facts", "codes", "fragment"),
    [
        ({}, "RUN_ACTIVE", "Airflow's run manual__1 of orders is running"),
        ({"scheduler_silent_seconds": BUSY_SECONDS + 5.0}, "RUN_ACTIVE SCHEDULER_SLOW", "last been heard 25 s ago"),
        ({"scheduler_silent_seconds": None}, "RUN_ACTIVE SCHEDULER_SLOW", "has not been heard"),
        ({"triggerer": "unhealthy"}, "RUN_ACTIVE TRIGGERER_AWAY", "triggerer is unhealthy"),
        ({"triggerer": None}, "RUN_ACTIVE TRIGGERER_AWAY", "triggerer is not there"),
        ({"capacity": 2}, "RUN_ACTIVE TRIGGERER_FULL", "3 tasks wait in Airflow's triggerer, which has room for 2"),
        ({"pools": {"mine": None}}, "RUN_ACTIVE POOL_MISSING", "Airflow has no pool mine, in which tasks of this run are"),
        (pool(1), "RUN_ACTIVE POOL_FULL", "No slot of Airflow's pool small is free: all 1 are taken"),
        (pool(0), "RUN_ACTIVE POOL_FULL", "Airflow's pool small has no slots"),
        (pool(4, -2, include_deferred=True), "RUN_ACTIVE POOL_FULL", "Tasks that wait in the triggerer take slots of it"),
        (pool(4, 1), "RUN_ACTIVE", "Airflow's run manual__1 of orders is running"),
        (pool(-1, -1), "RUN_ACTIVE", "Airflow's run manual__1 of orders is running"),
        ({"paused_page": PAGE}, "DAG_PAUSED", "its run manual__1 starts no task"),
        ({"paused_page": PAGE, "run": None}, "DAG_PAUSED", "so no run of it begins"),
    ],
)
def test_each_obstacle_is_named_and_a_run_that_goes_on(facts: dict[str, Any], codes: str, fragment: str) -> None:
    found = list(causes_of("orders", replace(FACTS, **facts), None))
    assert [cause.code for cause in found] == codes.split()
    assert fragment in found[-1].sentence
    assert all(cause.advice for cause in found)
    assert "paused_page" not in facts or found[0].advice == f"Unpause it in Airflow: {PAGE}"
