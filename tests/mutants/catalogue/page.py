"""Faults of the page and its API: who may see, act and ask, and what browsers are told."""

from tests.mutants.planted_fault import in_file

ACCESS_PY = in_file("tidegate/page/access.py")
ANSWERS = in_file("tidegate/page/http_answers.py")
METRICS_PY = in_file("tidegate/page/routes/metrics_route.py")
ACTION_ROUTES = in_file("tidegate/page/routes/action_routes.py")
BATCH_ROUTES = in_file("tidegate/page/routes/batch_routes.py")
PIPELINE_ROUTES = in_file("tidegate/page/routes/pipeline_routes.py")
METRIC_DEFINITIONS = in_file("tidegate/page/routes/metric_definitions.py")
QUERY_ROUTES = in_file("tidegate/page/routes/query_routes.py")

USER, SITE = "security:user-of-airflow-on-operator-page", "security:another-site-in-browser-of-logged-in"

MUTANTS = (
    ACCESS_PY("any-user-reads-any-pipeline", USER, "readable")(
        "if [-not is_allowed(user, READ, pipeline)-]{+user is None+}:", "test_every_route_of_a_pipeline_asks_for_permission"
    ),
    ACCESS_PY("readers-may-act", USER, "changeable")(
        "if not is_allowed(user, [-ACT-]{+READ+}, pipeline):", "test_readers_read_and_do_not_act"
    ),
    ACCESS_PY("an-action-needs-no-header", SITE, "changeable")(
        'if [-request.headers.get(ACTION_HEADER) != "1" or -]site != "same-origin":',
        "test_requests_that_another_site_has_made_up_do_nothing",
    ),
    ACCESS_PY("an-action-may-come-from-another-site", SITE, "changeable")(
        'if request.headers.get(ACTION_HEADER) != "1" or site [-!= "same-origin-]{+== "none+}":',
        "test_requests_that_another_site_has_made_up_do_nothing",
    ),
    ACCESS_PY("an-action-may-come-from-no-site", SITE, "_own_hosts")(
        "return set([-filter(None, named)-]{+named+})", "test_an_action_from_another_site_without_tls_is_refused"
    ),
    ACCESS_PY("one-user-takes-all-threads", "limit:MOST_REQUESTS", "in_turn")(
        "async with [-turns-]{+asyncio.Semaphore()+}:", "test_many_requests_of_one_user_leave_room_for_others"
    ),
    ACTION_ROUTES("a-reader-is-offered-actions", USER, "prospect")(
        "if not access.is_allowed(user, access.[-ACT-]{+READ+}, pipeline):", "test_readers_read_and_do_not_act"
    ),
    ACTION_ROUTES("an-error-names-pipelines-that-a-user-may-not-see", USER, "_registered_spec")(
        'f"No code here declares {pipeline}[-. Bring its file back, then try again.-]{+: {error}+}"',
        "test_an_error_names_no_pipeline_that_the_user_may_not_see",
    ),
    QUERY_ROUTES("a-query-is-for-those-who-may-read-some-of-it", "security:user-who-asks-query", "_askable")(
        "if [-readable.issuperset-]{+not readable.isdisjoint+}(query.pipelines)}",
        "test_queries_are_for_those_who_may_read_all_that_they_read",
    ),
    METRICS_PY("metrics-show-a-user-all-pipelines", "security:reader-of-metrics-endpoint", "scrape")(
        "if found is not None and user is [-not -]None:", "test_the_token_opens_all_pipelines_and_a_user_sees_his_own"
    ),
    METRICS_PY("a-token-that-others-can-read-opens-the-metrics", "security:reader-of-metrics-endpoint", "read_token")(
        "if mode & [-(stat.S_IRWXO | stat.S_IWGRP)-]{+stat.S_IWGRP+}:", "test_a_token_that_others_could_read_opens_nothing"
    ),
    METRICS_PY("a-short-token-opens-the-metrics", "security:reader-of-metrics-endpoint", "read_token")(
        "if len(token) < [-SHORTEST_TOKEN-]{+1+}:", "test_a_token_that_others_could_read_opens_nothing"
    ),
    METRIC_DEFINITIONS("a-hole-is-measured-as-none", "I9", "(module)")(
        "lambda p: int([-not -]p.is_whole)", "test_the_metrics_are_those_of_the_ledger"
    ),
    METRIC_DEFINITIONS("a-metric-of-the-dashboard-has-another-name", "security:reader-of-metrics-endpoint", "(module)")(
        '"tidegate_acks_[-due-]{+late+}"', "test_expressions_name_only_metrics_and_labels_that_exist"
    ),
    in_file("tidegate/observability/alerts.yml")("a-hole-alerts-nobody", "I9", "(module)")(
        "tidegate_hole > [-0-]{+1+}", "test_every_alert_fires_in_its_case_and_none_in_a_quiet_hour"
    ),
    ACTION_ROUTES("an-operator-needs-no-reason", "verb:skip", "act")(
        "[-operator_actions.require_reason(wanted.reason)-]{+wanted.reason+}, wanted.txid",
        "test_operators_act_on_the_page_and_the_ledger_knows_them",
    ),
    ANSWERS("the-page-may-stand-in-any-frame", SITE, "(module)")(
        "frame-ancestors [-'self'-]{+*+}", "test_browsers_are_told_what_the_page_may_do"
    ),
    ANSWERS("answers-of-one-user-are-kept-for-another", USER, "Answer.__init__")(
        'self.headers["Cache-Control"] = "[-private, no-cache-]{+public, max-age=60+}"',
        "test_answers_of_one_user_are_not_kept_for_another",
    ),
    ACCESS_PY("airflow-lets-a-user-read-the-pipelines-that-he-may-not", USER, "allowed")(
        "names[-.intersection(ask(dag_ids=names, user=user, method=method, team_name=team))-]",
        "test_users_see_the_pipelines_whose_dags_they_may_read",
    ),
    PIPELINE_ROUTES("the-overview-judges-pipelines-that-it-has-not-looked-at", "decision:0056", "pipelines")(
        "whys = root_causes(moment, mine{+[:limit]+})", "test_answers_are_small"
    ),
    BATCH_ROUTES("a-browser-rounds-the-numbers-of-an-input", "decision:0056", "_exactly")(
        "abs(value) >= {+2 * +}MOST_EXACT", "test_no_whole_number_of_an_input_is_rounded_by_a_browser"
    ),
)
