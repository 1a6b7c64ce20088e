"""Faults of the page and its API: who may see, act and ask, and what browsers are told."""

from tests.mutants.planted_fault import Mutant

ACCESS_PY, ANSWERS = "tidegate/page/access.py", "tidegate/page/http_answers.py"
METRICS_PY = "tidegate/page/routes/metrics_route.py"
ACCESS, METRICS = "tests/page/test_access.py", "tests/page/test_metrics.py"
USER, SITE = "security:user-of-airflow-on-operator-page", "security:another-site-in-browser-of-logged-in"

MUTANTS = (
    Mutant(
        "any-user-reads-any-pipeline",
        USER,
        ACCESS_PY,
        "readable",
        "if not is_allowed(user, READ, pipeline):",
        "if user is None:",
        (f"{ACCESS}::test_every_route_of_a_pipeline_asks_for_permission",),
    ),
    Mutant(
        "readers-may-act",
        USER,
        ACCESS_PY,
        "changeable",
        "if not is_allowed(user, ACT, pipeline):",
        "if not is_allowed(user, READ, pipeline):",
        (f"{ACCESS}::test_readers_read_and_do_not_act",),
    ),
    Mutant(
        "an-action-needs-no-header",
        SITE,
        ACCESS_PY,
        "changeable",
        'if request.headers.get(ACTION_HEADER) != "1" or site != "same-origin":',
        'if site != "same-origin":',
        (f"{ACCESS}::test_requests_that_another_site_has_made_up_do_nothing",),
    ),
    Mutant(
        "an-action-may-come-from-another-site",
        SITE,
        ACCESS_PY,
        "changeable",
        'if request.headers.get(ACTION_HEADER) != "1" or site != "same-origin":',
        'if request.headers.get(ACTION_HEADER) != "1" or site == "none":',
        (f"{ACCESS}::test_requests_that_another_site_has_made_up_do_nothing",),
    ),
    Mutant(
        "a-reader-is-offered-actions",
        USER,
        "tidegate/page/routes/action_routes.py",
        "prospect",
        "if not access.is_allowed(user, access.ACT, pipeline):",
        "if not access.is_allowed(user, access.READ, pipeline):",
        (f"{ACCESS}::test_readers_read_and_do_not_act",),
    ),
    Mutant(
        "an-error-names-pipelines-that-a-user-may-not-see",
        USER,
        "tidegate/page/routes/action_routes.py",
        "_registered_spec",
        'f"No code here declares {pipeline}. Bring its file back, then try again."',
        'f"No code here declares {pipeline}: {error}"',
        (f"{ACCESS}::test_an_error_names_no_pipeline_that_the_user_may_not_see",),
    ),
    Mutant(
        "a-query-is-for-those-who-may-read-some-of-it",
        "security:user-who-asks-query",
        "tidegate/page/routes/query_routes.py",
        "_askable",
        "if readable.issuperset(query.pipelines)}",
        "if not readable.isdisjoint(query.pipelines)}",
        (f"{ACCESS}::test_queries_are_for_those_who_may_read_all_that_they_read",),
    ),
    Mutant(
        "metrics-show-a-user-all-pipelines",
        "security:reader-of-metrics-endpoint",
        METRICS_PY,
        "scrape",
        "if found is not None and user is not None:",
        "if found is not None and user is None:",
        (f"{METRICS}::test_the_token_opens_all_pipelines_and_a_user_sees_his_own",),
    ),
    Mutant(
        "a-token-that-others-can-read-opens-the-metrics",
        "security:reader-of-metrics-endpoint",
        METRICS_PY,
        "read_token",
        "if mode & (stat.S_IRWXO | stat.S_IWGRP):",
        "if mode & stat.S_IWGRP:",
        (f"{METRICS}::test_a_token_that_others_could_read_opens_nothing",),
    ),
    Mutant(
        "a-short-token-opens-the-metrics",
        "security:reader-of-metrics-endpoint",
        METRICS_PY,
        "read_token",
        "if len(token) < SHORTEST_TOKEN:",
        "if len(token) < 1:",
        (f"{METRICS}::test_a_token_that_others_could_read_opens_nothing",),
    ),
    Mutant(
        "the-page-may-stand-in-any-frame",
        SITE,
        ANSWERS,
        "(module)",
        "frame-ancestors 'self'",
        "frame-ancestors *",
        (f"{ACCESS}::test_browsers_are_told_what_the_page_may_do",),
    ),
    Mutant(
        "answers-of-one-user-are-kept-for-another",
        USER,
        ANSWERS,
        "Answer.__init__",
        'self.headers["Cache-Control"] = "private, no-cache"',
        'self.headers["Cache-Control"] = "public, max-age=60"',
        (f"{ACCESS}::test_answers_of_one_user_are_not_kept_for_another",),
    ),
)
