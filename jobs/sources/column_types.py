"""Parses the Spark types that authors declare for columns, and writes columns as Spark does."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN_CHARACTERS = 100  # of a refused value, in the error
Family = Literal[
    "text", "integer", "decimal", "boolean", "float", "date", "timestamp", "timestamp_ntz", "binary", "array", "map", "struct"
]
# Spark's name of a type: its family, and pyarrow's alias of it, which is not used for timestamps.
_SIMPLE: dict[str, tuple[Family, str]] = {
    "string": ("text", "string"),
    "boolean": ("boolean", "bool"),
    "tinyint": ("integer", "int8"),
    "byte": ("integer", "int8"),
    "smallint": ("integer", "int16"),
    "short": ("integer", "int16"),
    "int": ("integer", "int32"),
    "integer": ("integer", "int32"),
    "bigint": ("integer", "int64"),
    "long": ("integer", "int64"),
    "float": ("float", "float"),
    "real": ("float", "float"),
    "double": ("float", "double"),
    "date": ("date", "date32"),
    "timestamp": ("timestamp", "timestamp"),
    "timestamp_ltz": ("timestamp", "timestamp"),
    "timestamp_ntz": ("timestamp_ntz", "timestamp_ntz"),
    "binary": ("binary", "binary"),
}
# Types of states that are called otherwise in Spark.
_OF_POSTGRES = {"text": "string", "varchar": "string", "timestamptz": "timestamp", "bytea": "binary", "bool": "boolean"}
_DECIMAL = re.compile(r"(?:decimal|dec|numeric)\s*(?:\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?", re.IGNORECASE)
# What the error about a refused value adds, by family.
_HINTS = {
    "decimal": " (nothing is rounded)",
    "date": " of the form 2024-01-05",
    "timestamp": " of the form 2024-01-05T10:00:00.123456Z (six digits at most, the zone may be left out)",
    "timestamp_ntz": " of the form 2024-01-05T10:00:00.123456, without a zone",
}


@dataclass(frozen=True)
class SparkType:
    """The type of a declared column.

    `alias` is pyarrow's name of a simple type, `digits` are a decimal's precision and scale, `parts` the types in a nested
    type, with field names for a struct.
    """

    name: str
    family: Family
    alias: str = ""
    digits: tuple[int, int] = (0, 0)
    parts: tuple[tuple[str, "SparkType"], ...] = field(default=())

    @cached_property
    def arrow(self) -> "pa.DataType":
        """Return the Arrow type."""
        import pyarrow as pa  # noqa: PLC0415 - declaring a pipeline must not load pyarrow

        parts = [part.arrow for _, part in self.parts]
        if self.family == "decimal":
            return pa.decimal128(*self.digits)
        if self.family in ("timestamp", "timestamp_ntz"):
            return pa.timestamp("us", "UTC" if self.family == "timestamp" else None)
        if self.family == "array":
            return pa.list_(*parts)
        if self.family == "map":
            return pa.map_(*parts)
        if self.family == "struct":
            return pa.struct(list(zip((name for name, _ in self.parts), parts, strict=True)))
        return pa.type_for_alias(self.alias)

    def refusal(self, value: object) -> str:
        """Return why a value is not of this type."""
        text = repr(value)
        excerpt = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
        return f"{excerpt} is no {self.name}{_HINTS.get(self.family, '')}"


def columns_of(schema: Mapping[str, str]) -> str:
    """Return columns as Spark writes them: ```name` string, `amount` int``."""
    return ", ".join(f"{quoted(name)} {kind}" for name, kind in schema.items())


def check_names(names: Iterable[str]) -> None:
    """Refuse columns, or fields, that Spark takes for one: it ignores upper and lower case.

    Raises: ValueError.
    """
    seen: dict[str, str] = {}
    for name in names:
        if (lower := name.lower()) in seen:
            raise ValueError(f"{seen[lower]} and {name} differ by case at most, and are one name to Spark: declare one of them")
        seen[lower] = name


def in_another_case(missing: Iterable[str], names: Iterable[str]) -> str:
    """Return a remark on those names that differ from the missing ones by upper and lower case alone; "" without any."""
    lower = {name.lower() for name in missing}
    similar = [name for name in names if name.lower() in lower]
    return f" (it has {', '.join(similar)}: upper and lower case differ)" if similar else ""


def quoted(name: str) -> str:
    """Return a column's name quoted for Spark."""
    return f"`{name.replace('`', '``')}`"


def parse_type(text: str) -> SparkType:
    """Parse Spark's name of a type.

    Raises: ValueError for an unknown or unsupported type.
    """
    kind, rest = _leading_type(text.strip())
    if rest.strip():
        raise ValueError(f"{text!r} is not a type")
    return kind


def _leading_type(text: str) -> tuple[SparkType, str]:
    """Return the type at the beginning of a text, and the rest."""
    match = re.match(r"\s*(\w+)\s*(<|\([^)]*\))?", text)
    if not match:
        raise ValueError(f"{text!r} is not a type")
    name, rest = match[1].lower(), text[match.end() :]
    if match[2] == "<":
        return _parse_nested(name, rest)
    whole = match[0].strip()
    if decimal := _DECIMAL.fullmatch(whole):
        precision, scale = int(decimal[1] or 10), int(decimal[2] or 0)
        if not (1 <= precision <= 38 and scale <= precision):
            raise ValueError(f"{whole!r} is not a type: a decimal has up to 38 digits")
        return SparkType(f"decimal({precision},{scale})", "decimal", digits=(precision, scale)), rest
    if match[2] or name not in _SIMPLE:
        hint = f": sources have Spark's types, so {_OF_POSTGRES[name]}" if name in _OF_POSTGRES else ""
        raise ValueError(f"{whole!r} is not a type of a column{hint}")
    family, alias = _SIMPLE[name]
    return SparkType(name, family, alias), rest


def _parse_nested(name: str, rest: str) -> tuple[SparkType, str]:
    parts: list[tuple[str, SparkType]] = []
    is_closed, rest = rest.lstrip().startswith(">"), rest.lstrip().removeprefix(">")
    while not is_closed:
        part = ""
        if name == "struct":
            label = re.match(r"\s*(?:`((?:[^`]|``)+)`|(\w+))\s*(?::|\s)\s*", rest)
            if not label:
                raise ValueError(f"{rest!r} does not start with the name of a field")
            part, rest = (label[1] or label[2]).replace("``", "`"), rest[label.end() :]
        kind, rest = _leading_type(rest)
        parts.append((part, kind))
        end, rest = rest.lstrip()[:1], rest.lstrip()[1:]
        if end not in (",", ">"):
            raise ValueError(f"a {name}<...> is not closed")
        is_closed = end == ">"
    check_names(filter(None, map(itemgetter(0), parts)))
    inside = ", ".join(f"{part}: {kind.name}" if part else kind.name for part, kind in parts)
    families: dict[str, Family] = {"array": "array", "map": "map", "struct": "struct"}
    fits = {"array": len(parts) == 1, "map": len(parts) == 2 and parts[0][1].family == "text"}
    if name not in families or not fits.get(name, True):
        raise ValueError(f"{name}<{inside}> is not a type that text can have")
    return SparkType(f"{name}<{inside}>", families[name], parts=tuple(parts)), rest
