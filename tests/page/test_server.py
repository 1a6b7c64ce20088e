"""The page's server: who may see and do what, and that it tells what the ledger says."""

from collections.abc import Callable

from tests.page.conftest import Server, Visitor

Visit = Callable[..., Visitor]


def test_users_see_the_pipelines_whose_dags_they_may_read(server: Server, visit: Visit) -> None:
    """With broken code, without code and without a Dag, too."""
    shown = {
        name: [row["name"] for row in visit(name).json("/pipelines")["pipelines"]] for name in ("viewer", "clerk", "nobody")
    }

    assert shown == {"viewer": ["broken", "clicks", "orphan"], "clerk": ["clicks", "orphan"], "nobody": []}
    assert [visit("clerk").get(f"/api/pipelines/{name}").status_code for name in ("clicks", "broken")] == [200, 403]
    assert visit("admin").json("/pipelines/broken")["declared"] is False
