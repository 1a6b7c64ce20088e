"""The users of the page's tests."""

import json

import httpx

ROLES = {"admin": "admin", "viewer": "viewer", "clerk": "viewer", "nobody": "viewer"}  # of each user; see `auth_manager`
USERS = ",".join(f"{name}:{role}" for name, role in ROLES.items())
AUTH_MANAGER = "tests.page.auth_manager.PerDagAuthManager"


def passwords() -> str:
    return json.dumps({name: f"password of {name}" for name in ROLES})


def token_of(url: str, name: str) -> str:
    answer = httpx.post(f"{url}/auth/token", json={"username": name, "password": f"password of {name}"}, timeout=400)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["access_token"])
