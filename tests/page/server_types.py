"""The types of answers for the front end, from the server's models: `python -m tests.page.server_types` writes them."""

import json
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import tests.airflow_home  # noqa: F401 - before anything else imports Airflow
from tidegate.page.app import create_app

FILE = Path(__file__).resolve().parents[2] / "tidegate/page/frontend/src/server_types.ts"
HEAD = "/** Written by `make page` from the server's models: change those. Times are ISO 8601 in UTC. */\n"
_PLAIN = {"string": "string", "integer": "number", "number": "number", "boolean": "boolean", "null": "null"}


def server_types() -> str:
    """Return a type for each model that a route answers with, and for those within."""
    answers = {route.response_model for route in create_app().routes if isinstance(route, APIRoute)}
    models = [(model, "serialization") for model in answers if isinstance(model, type) and issubclass(model, BaseModel)]
    schemas = models_json_schema(models)[1]["$defs"]
    return HEAD + "".join(f"\nexport type {name} = {_type(schemas[name])};\n" for name in sorted(schemas))


def _type(schema: dict[str, Any]) -> str:
    """Return a JSON schema as a type; what it leaves open is unknown."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " | ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    if "const" in schema:
        return json.dumps(schema["const"])
    if "prefixItems" in schema:
        return f"[{', '.join(map(_type, schema['prefixItems']))}]"
    if schema.get("type") == "array":
        items = _type(schema["items"])
        return f"({items})[]" if " | " in items else f"{items}[]"
    if schema.get("type") == "object":
        return _object(schema)
    return _PLAIN[schema["type"]] if "type" in schema else "unknown"


def _object(schema: dict[str, Any]) -> str:
    if "properties" not in schema:
        keys, values = schema.get("propertyNames", {"type": "string"}), schema.get("additionalProperties")
        return f"Partial<Record<{_type(keys)}, {_type(values) if isinstance(values, dict) else 'unknown'}>>"
    fields = (f"  {name}: {_type(each)};\n" for name, each in schema["properties"].items())  # an answer has its defaults, too
    return "{\n" + "".join(fields) + "}"


if __name__ == "__main__":
    FILE.write_text(server_types())
