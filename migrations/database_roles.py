"""Tidegate's roles in Postgres, and the statements with which an administrator makes them and the database.

No role of Tidegate is a superuser or may make roles. The statements need no superuser either: CREATEROLE and CREATEDB do, as
managed services give them.
"""

from tidegate.state_store.connections import statement_text

OWNER = "tidegate_owner"
# The migrations grant to these names.
ROLES = {
    OWNER: "owns the tables, migrates them",
    "tidegate": "plans, processes, commits",
    "tidegate_stager": "Spark's executors: stages rows",
    "tidegate_reader": "people and the page: reads",
}


def statements_for_administrator(database: str) -> str:
    """Return the statements with which an administrator prepares a server, for psql, which asks for the passwords."""
    name = statement_text.quoted(database)
    makes = [f"CREATE ROLE {role} LOGIN; -- {work}\n\\password {role}\n" for role, work in ROLES.items()]
    others = ", ".join(role for role in ROLES if role != OWNER)
    return (
        "".join(makes)
        + f"CREATE DATABASE {name} ENCODING 'UTF8';\n"
        + f"REVOKE ALL ON DATABASE {name} FROM PUBLIC;\n"
        + f"GRANT CONNECT, CREATE ON DATABASE {name} TO {OWNER};\n"
        + f"GRANT CONNECT ON DATABASE {name} TO {others};\n"
    )
