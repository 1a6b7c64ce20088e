"""Impure SQL: what in an author's Spark SQL gives another value each time, as does the same in Python."""

import re
from collections.abc import Collection, Iterator, Set
from typing import NamedTuple

# Functions whose values differ each time, or by account, or depend on how Spark happened to read the files or to share the
# rows among its tasks; and those that call any code.
FUNCTIONS = frozenset(
    {
        *("rand", "random", "randn", "randstr", "uniform", "uuid", "shuffle"),
        *("monotonically_increasing_id", "spark_partition_id", "distributed_sequence_id", "distributed_id"),
        *("current_timestamp", "current_date", "current_time", "localtimestamp", "localtime", "now", "curdate"),
        *("current_user", "session_user", "user"),
        *("input_file_name", "input_file_block_start", "input_file_block_length"),
        *("reflect", "try_reflect", "java_method"),
    }
)
# SQL calls some of these without brackets, unless a column has the name; many are named `user`. CLOCK reads the clock only
# without an argument, and ENCRYPTION draws a random vector unless it is given one, or needs none.
_BARE = frozenset(
    {*("current_timestamp", "current_date", "current_time", "localtimestamp", "localtime"), "current_user", "session_user"}
)
CLOCK, ENCRYPTION, FILE = "unix_timestamp", "aes_encrypt", "_metadata"
# Functions whose values depend on the order of rows wherever no order, or an order with equal rows, is given.
COLLECTING = frozenset({"collect_list", "collect_set", "array_agg"})
CHOOSING = COLLECTING | {
    *("first", "first_value", "last", "last_value", "any_value", "nth_value", "mode", "max_by", "min_by"),
    *("listagg", "string_agg", "row_number", "ntile", "lag", "lead", "percentile_approx", "approx_percentile"),
    *("approx_top_k", "histogram_numeric", "hll_sketch_agg", "theta_sketch_agg", "tuple_sketch_agg_double"),
    *("tuple_sketch_agg_integer", "kll_sketch_agg_bigint", "kll_sketch_agg_double", "kll_sketch_agg_float"),
}
# Functions of an array to which the order of its elements is indifferent.
UNORDERED = frozenset(
    {"sort_array", "array_sort", "size", "array_size", "cardinality", "array_contains", "array_max", "array_min"}
)
# A text that Spark takes for the clock, where it stands for a time.
CLOCK_TEXT = re.compile(r"\s*(now|today|tomorrow|yesterday)(\s.*)?", re.IGNORECASE | re.DOTALL)
OF_TIMES = re.compile(r"date|time|year|month|quarter|week|day|hour|minute|second|trunc", re.IGNORECASE)
# Texts, names in quotes and comments.
_QUOTED = re.compile(
    r"""(?<!\w)r'[^']*'|(?<!\w)r"[^"]*"|'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*"|`(?:[^`]|``)*`|--[^\n]*|/\*.*?\*/""",
    re.IGNORECASE | re.DOTALL,
)
_CALL = re.compile(r"\b([a-z_]\w*)\b\s*(\(\s*\)|\()?", re.IGNORECASE)
_CLAUSES = {"limit": re.compile(r"\blimit\s", re.IGNORECASE), "sample": re.compile(r"\btablesample\b", re.IGNORECASE)}
_ARGUMENT = r"(?:[^(),]|\((?:[^()]|\([^()]*\))*\))*"
_DRAWING = re.compile(rf"\b{ENCRYPTION}\s*\((?!(?:{_ARGUMENT},){{4}})", re.IGNORECASE)
_MODE_WITHOUT = re.compile(r"['\"]ecb['\"]", re.IGNORECASE)
_WORD, _TIME = r"'(now|today|tomorrow|yesterday)'", r"(?:date|timestamp)"
_AS_TIME = re.compile(
    rf"\b{_TIME}\w*\s*{_WORD}|\bcast\s*\(\s*{_WORD}\s+as\s+{_TIME}|{_WORD}\s*::\s*{_TIME}"
    rf"|\b\w*(?:{OF_TIMES.pattern})\w*\s*\([^()]*{_WORD}|\bbetween\s+(?:\S+\s+and\s+)?{_WORD}"
    rf"|(?:<=?|(?<![<=])>=?)\s*{_WORD}|{_WORD}\s*(?:<=?(?![>=])|>=?)",
    re.IGNORECASE,
)
_EQUAL = rf"\s*(?:==?|<=>|<>|!=|\s(?:not\s+)?in\s*\([^()]*?)\s*{_WORD}"
_BESIDE = re.compile(rf"\b(\w+){_EQUAL}|{_WORD}\s*(?:==?|<=>|<>|!=)\s*(\w+)", re.IGNORECASE)


class Impure(NamedTuple):
    """What gives another result each time, or, if it is not certain, only where rows have no unique order.

    With `beside`, it does so if the column of this name has times.
    """

    name: str
    is_certain: bool = True
    beside: str = ""


def clock_text(word: str, beside: str = "") -> Impure:
    """Return a text that Spark takes for the clock; with `beside`, if that column has times."""
    return Impure(f"{word.strip().lower()!r} as a time", beside=beside.lower())


def impure_in_sql(text: str, columns: Collection[str] = ()) -> Iterator[Impure]:
    """Yield what is impure in a query or an expression over these columns."""
    unquoted = _QUOTED.sub(_blanked, text)
    yield from (Impure(f"{name}()", name == "sample") for name, clause in _CLAUSES.items() if clause.search(unquoted))
    yield from (clock_text("".join(filter(None, found.groups()))) for found in _AS_TIME.finditer(unquoted))
    yield from (clock_text(word or other, left or right) for left, word, other, right in _BESIDE.findall(unquoted))
    yield from _impure_calls(_CALL.findall(unquoted), {column.lower() for column in columns})
    if _DRAWING.search(unquoted) and not _MODE_WITHOUT.search(text):
        yield Impure(f"{ENCRYPTION}() without a vector")


def _impure_calls(calls: list[tuple[str, str]], columns: Set[str]) -> Iterator[Impure]:
    has_order = any(called.lower() in UNORDERED for called, _ in calls)
    for called, brackets in calls:
        name = called.lower()
        if (name in FUNCTIONS and (brackets or name in _BARE - columns)) or (name == CLOCK and brackets.endswith(")")):
            yield Impure(f"{name}()")
        elif name == FILE and name not in columns:
            yield Impure(name)
        elif name in CHOOSING and brackets and not (has_order and name in COLLECTING):
            yield Impure(f"{name}()", is_certain=False)


def _blanked(quoted: re.Match[str]) -> str:
    """Return what is left of a text, a name in quotes or a comment: the name of a function, a word for the clock."""
    found, after = quoted[0], quoted.string[quoted.end() :]
    if found[0] == "`":
        return found.strip("`") if _QUOTED.sub(" ", after[:100]).lstrip().startswith("(") else ""
    if found.startswith(("--", "/*")):
        return " "
    word = CLOCK_TEXT.fullmatch(found.lstrip("rR")[1:-1])
    return f"'{word[1]}'" if word else "''"
