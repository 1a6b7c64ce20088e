"""What Airflow's facts mean for a pipeline that waits; tests/end_to_end asks a real Airflow."""

from dataclasses import replace
from typing import Any

import pytest

from tidegate.explain.airflow_report import BUSY_SECONDS, Facts, causes_of

FACTS = Facts({"dag_run_id": "manual__1", "state": "running"}, None, None, 1.0, "healthy", {}, 3, 2000)


def pool(slots: int, open_slots: int = 0, *, include_deferred: bool = False) -> Facts:
    known = {"slots": slots, "open_slots": open_slots, "include_deferred": include_deferred}
    return replace(FACTS, pools={"small": known})


@pytest.mark.parametrize(
    ("facts", "codes", "fragment"),
    [
        (FACTS, [], "Airflow's run manual__1 of orders is running"),
        (replace(FACTS, scheduler_silent_seconds=BUSY_SECONDS + 5.0), ["SCHEDULER_SLOW"], "last been heard 25 s ago"),
        (replace(FACTS, scheduler_silent_seconds=None), ["SCHEDULER_SLOW"], "has not been heard"),
        (replace(FACTS, triggerer="unhealthy"), ["TRIGGERER_AWAY"], "triggerer is unhealthy"),
        (replace(FACTS, triggerer=None), ["TRIGGERER_AWAY"], "triggerer is not there"),
        (replace(FACTS, capacity=2), ["TRIGGERER_FULL"], "3 tasks wait in Airflow's triggerer, which has room for 2"),
        (replace(FACTS, pools={"mine": None}), ["POOL_MISSING"], "Airflow has no pool mine, in which tasks of this run are"),
        (pool(1), ["POOL_FULL"], "No slot of Airflow's pool small is free: all 1 are taken"),
        (pool(0), ["POOL_FULL"], "Airflow's pool small has no slots"),
        (pool(4, -2, include_deferred=True), ["POOL_FULL"], "wait for one. Tasks that wait in the triggerer take slots of it"),
        (pool(4, 1), [], "Airflow's run manual__1 of orders is running"),
        (pool(-1, -1), [], "Airflow's run manual__1 of orders is running"),
    ],
)
def test_each_obstacle_is_named_besides_the_active_run(facts: Facts, codes: list[str], fragment: str) -> None:
    found = list(causes_of("orders", facts, None))
    assert [cause.code for cause in found] == ["RUN_ACTIVE", *codes]
    assert fragment in found[-1].sentence
    assert all(cause.advice for cause in found)


@pytest.mark.parametrize(("run", "says"), [(FACTS.run, "its run manual__1 starts no task"), (None, "so no run of it begins")])
def test_no_run_of_a_paused_dag_is_said_to_go_on(run: Any, says: str) -> None:
    (found,) = causes_of("orders", replace(FACTS, run=run, paused_page="http://127.0.0.1:8080/dags/orders"), None)
    assert (found.code, says in found.sentence) == ("DAG_PAUSED", True)
    assert found.advice == "Unpause it in Airflow: http://127.0.0.1:8080/dags/orders"
