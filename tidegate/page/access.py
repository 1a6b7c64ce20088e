"""Who asks, and what they may do: Airflow's own login and its permissions on the pipeline's Dag.

Reading a pipeline needs GET on its Dag, acting PUT. Both are asked of Airflow's auth manager, also if the Dag does not exist.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.core_api.security import get_user
from airflow.configuration import conf
from airflow.models.dag import DagModel
from fastapi import Depends, HTTPException, Path, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from tidegate.page.http_answers import Refusal
from tidegate.state_store.base.errors import UnknownPipeline, storable
from tidegate.state_store.declarations.column_spec import NAME

ACTION_HEADER = "X-Tidegate-Action"
READ: Literal["GET"] = "GET"
ACT: Literal["PUT"] = "PUT"
# The requests of one user that are worked on at once, in each process of the api-server: the page of all others and Airflow's
# own share its threads, and the page its connections.
MOST_REQUESTS = 4

_at_work: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
_bearer = HTTPBearer(auto_error=False)


async def current_user(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)] = None
) -> Any:
    """Return Airflow's user: of the token in the header, else of the session's cookie.

    Raises: Refusal (401).
    """
    try:
        return await get_user(request, None, credentials)
    except HTTPException as refused:
        raise Refusal(401, "NOT_LOGGED_IN", f"Log in to Airflow first: {refused.detail}.") from refused


@asynccontextmanager
async def in_turn(user: Any) -> AsyncIterator[Any]:
    """Yield the user once fewer than MOST_REQUESTS requests of this user are at work; until then, wait without a thread."""
    turns = _at_work.setdefault(user.get_id(), asyncio.Semaphore(MOST_REQUESTS))
    async with turns:
        yield user


async def _user_in_turn(user: Annotated[Any, Depends(current_user)]) -> AsyncIterator[Any]:
    async with in_turn(user):
        yield user


User = Annotated[Any, Depends(_user_in_turn, scope="function")]  # until the answer is made, however long its reader takes


def is_allowed(user: Any, method: Literal["GET", "PUT"], pipeline: str) -> bool:
    """Return whether Airflow lets the user read, or change, the Dag of this pipeline."""
    return pipeline in allowed(user, method, [pipeline])


def allowed(user: Any, method: Literal["GET", "PUT"], pipelines: Iterable[str]) -> Collection[str]:
    """Return the pipelines whose Dags Airflow lets the user read, or change, from one question for each team."""
    by_team: dict[str | None, set[str]] = {}
    for pipeline, team in _teams(list(pipelines)).items():
        by_team.setdefault(team, set()).add(pipeline)
    ask = get_auth_manager().filter_authorized_dag_ids  # managers with a server of their own answer for many Dags at once
    return {
        pipeline
        for team, names in by_team.items()
        for pipeline in names.intersection(ask(dag_ids=names, user=user, method=method, team_name=team))
    }


def readable(pipeline: Annotated[str, Path(max_length=200)], user: User) -> str:
    """Return the name of the requested pipeline, which the user may read; it need not exist.

    Raises: Refusal (403).
    """
    if not is_allowed(user, READ, pipeline):
        raise Refusal(403, "FORBIDDEN", f"Airflow does not let you read Dag {pipeline}. Ask its administrator.")
    return _a_name(pipeline)


def changeable(request: Request, pipeline: Annotated[str, Path(max_length=200)], user: User) -> str:
    """Return the name of the requested pipeline, on which the user may act, and means to.

    A browser sends the session's cookie along with a request that another site has made up; but no site can add a header to
    one without asking the browser for permission, and the browser says where a request comes from.

    Raises: Refusal (403).
    """
    site = request.headers.get("Sec-Fetch-Site", "same-origin")
    if request.headers.get(ACTION_HEADER) != "1" or site != "same-origin":
        raise Refusal(403, "FOREIGN_REQUEST", f"An action needs header {ACTION_HEADER}: 1, and cannot come from another site.")
    origin = request.headers.get("Origin")
    # Browsers leave the other header out where the page came without TLS.
    if "Sec-Fetch-Site" not in request.headers and origin and origin.partition("://")[2] not in _own_hosts(request):
        proxy = "A proxy in front of Airflow needs TLS, or its address as Airflow's setting AIRFLOW__API__BASE_URL."
        message = f"An action cannot come from another site, and yours comes from {origin}. {proxy}"
        raise Refusal(403, "FOREIGN_REQUEST", message)
    if not is_allowed(user, ACT, pipeline):
        raise Refusal(403, "FORBIDDEN", may_not_change(pipeline))
    return _a_name(pipeline)


def _own_hosts(request: Request) -> set[str]:
    """Return the host that the request names, and the one at which Airflow's settings say that a proxy answers for it."""
    named = (request.headers.get("Host", ""), urlsplit(conf.get("api", "base_url", fallback="")).netloc.lower())
    return set(filter(None, named))


def may_not_change(pipeline: str) -> str:
    """Return why a user may not act on a pipeline."""
    return f"Airflow does not let you change Dag {pipeline}. Ask its administrator."


def owner(user: Any, verb: str) -> str:
    """Return who acts, for the ledger."""
    return storable(f"{user.get_name()}, page {verb}")


Readable = Annotated[str, Depends(readable)]
Changeable = Annotated[str, Depends(changeable)]


def _a_name(pipeline: str) -> str:
    """Return what can be a pipeline's name; anything else, such as a NUL, gets no further."""
    if not NAME.fullmatch(pipeline):
        raise UnknownPipeline(f"No pipeline can have the name {pipeline!r}.")
    return pipeline


def _teams(pipelines: list[str]) -> dict[str, str | None]:
    """Return the team that each Dag belongs to, if Airflow has teams."""
    known = DagModel.get_dag_id_to_team_name_mapping(pipelines) if conf.getboolean("core", "multi_team") else {}
    return {pipeline: known.get(pipeline) for pipeline in pipelines}
