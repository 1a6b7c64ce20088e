"""The JSON Schemas of the verbs: complete and valid. `CommandLine.json` compares each output."""

import re
from typing import Any

import jsonschema
import pytest

from tests.cli.conftest import SCHEMAS
from tests.cli.test_verbs import COMMANDS

VERBS = [verb for verb, command in COMMANDS.items() if any("--json" in parameter.opts for parameter in command.params)]


@pytest.mark.promise("json:*")
def test_every_verb_with_json_output_has_a_schema() -> None:
    assert list(SCHEMAS) == sorted(VERBS)


@pytest.mark.promise("json:*")
def test_each_schema_is_valid_and_says_its_version() -> None:
    for verb, schema in SCHEMAS.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["$id"] == f"urn:tidegate:json:{verb.replace(' ', '-')}:1"
        assert schema["title"] == f"tidegate {verb} --json"
        for part in _objects(schema):
            assert set(part.get("required", ())) == set(part["properties"]), verb
            assert [name for name in part["properties"] if not re.fullmatch(r"[a-z]+(_[a-z]+)*", name)] == [], verb


def _objects(schema: Any) -> list[dict[str, Any]]:
    parts = list(schema.values()) if isinstance(schema, dict) else schema if isinstance(schema, list) else []
    found = [part for each in parts for part in _objects(each)]
    return [schema, *found] if isinstance(schema, dict) and "properties" in schema and schema.get("type") == "object" else found
