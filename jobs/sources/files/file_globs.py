"""Globs select files: ``*``, ``?``, ``[a-z]``, ``**``, ``{a,b}``; hidden names and unfinished files are left alone."""

import re
from collections.abc import Collection, Iterable, Iterator
from fnmatch import translate
from functools import cache
from itertools import islice, pairwise

from tidegate.jobs.sources.files.unfinished_files import HIDDEN, UNFINISHED, is_finished, is_hidden

_SECTION = re.compile(r"\[!?(?:\][^\]]*|[^\]]+)\]")
_SIGN = re.compile(rf"{_SECTION.pattern}|[{{}},]")
# The most alternatives that braces may expand to: each is compared with each name.
MOST = 1000
# Syntax of shells and regular expressions that these globs lack, and its replacement.
_FOREIGN = (
    (re.compile(r"[@!+?*]\("), "no lists in parentheses: write {a,b}"),
    (re.compile(r"\|"), "no |: write {*.json,*.jsonl}, or [|] for the sign itself"),
    (re.compile(r"\\"), "no backslash: write [*] for the sign *, and / between folders"),
)

# The rest of an alternative, from some folder on: the names that are to be found there, one in the other.
GlobPosition = tuple[str, ...]


class Glob:
    """A glob, split into alternatives and these into names between slashes.

    Raises: ValueError that says what is wrong with the pattern.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        _check_signs(pattern)
        alternatives = list(islice(_expanded(pattern), MOST + 1))
        if len(alternatives) > MOST:
            raise ValueError(f"the glob {pattern} stands for more than {MOST} others. Use fewer braces")
        for alternative in alternatives:
            _check_names(pattern, alternative.split("/"))
        self._alternatives = [_names(alternative) for alternative in dict.fromkeys(alternatives)]

    def start(self) -> frozenset[GlobPosition]:
        """Return the positions that match names in the source folder itself."""
        return _with_optional(self._alternatives)

    def below(self, positions: frozenset[GlobPosition], name: str, *, strict: bool = True) -> frozenset[GlobPosition]:
        """Return the positions that match names in this folder; none if the glob does not lead into it.

        Without `strict`, names that writers reserve are names like any other.
        """
        inside = []
        for position in positions:
            part, rest = position[0], position[1:]
            if part == "**":
                inside += [] if strict and is_hidden(name) else [position]
            elif rest and _takes(part, name, strict=strict):
                inside.append(rest)
        return _with_optional(inside)

    def takes(self, positions: Iterable[GlobPosition], name: str) -> bool:
        """Return whether the glob takes a file of this name."""
        return any(_takes(part, name) and is_finished(part, name) for part, *rest in positions if not rest)

    def takes_somewhere(self, name: str) -> bool:
        """Return whether the glob takes a file of this name in some folder."""
        return self.takes([alternative[-1:] for alternative in self._alternatives], name)

    def why_not(self, positions: frozenset[GlobPosition], name: str) -> str:
        """Return why the glob does not take a file of this name."""
        last = [part for part, *rest in positions if not rest]
        if not any(_takes(part, name, strict=False) for part in last):
            return f"does not match {self.pattern}"
        return UNFINISHED if any(_takes(part, name) for part in last) else HIDDEN


def _check_signs(pattern: str) -> None:
    plain = _SECTION.sub("x", pattern)
    for foreign, advice in _FOREIGN:
        if foreign.search(plain):
            raise ValueError(f"the glob {pattern} is not read: it can have {advice}")
    if "[" in plain:
        raise ValueError(f"the glob {pattern} opens a [ and never closes it. Write [[] for the sign itself")
    if "[^" in pattern:
        raise ValueError(f"the glob {pattern} has [^...]: write [!...] for all signs but these")
    depth = 0
    for sign in re.findall(r"[{}]", plain):
        depth += 1 if sign == "{" else -1
        if depth < 0:
            break
    if depth:
        raise ValueError(f"the glob {pattern} has a brace without its partner. Write {{a,b}}, or [{{] for the sign itself")


def _check_names(pattern: str, names: list[str]) -> None:
    """Check the names between the slashes of one alternative."""
    if names[0].startswith("~") or any(name in ("", ".", "..") for name in names):
        raise ValueError(
            f"the glob {pattern!r} has a name in it that is empty, . or .., or starts with ~. It begins in the folder: "
            'write "*" for its files, "**/*" for those of its folders too'
        )
    if any("[" in _SECTION.sub("x", name) for name in names):
        raise ValueError(f"the glob {pattern} has a / between [ and ]. Write {{a,b/c}} for one of several")
    if any("**" in name and name != "**" for name in names):
        raise ValueError(f"the glob {pattern} is not read: it can have ** only as the name of a folder, as in **/*.json")


def _names(alternative: str) -> GlobPosition:
    """Return the names between the slashes; several ``**`` in a row become one, which is never the last."""
    names = alternative.split("/")
    once = [name for name, before in zip(names, [None, *names], strict=False) if not name == before == "**"]
    return (*once, "*") if once[-1] == "**" else tuple(once)


def _with_optional(positions: Collection[GlobPosition]) -> frozenset[GlobPosition]:
    """Return these positions, and those after a ``**``, which may stand for no folder at all."""
    return frozenset(positions) | {position[1:] for position in positions if position[0] == "**"}


def _takes(part: str, name: str, *, strict: bool = True) -> bool:
    if strict and is_hidden(name) and part[0] != name[0]:
        return False
    return _compiled(part).match(name) is not None


def _expanded(pattern: str) -> Iterator[str]:
    """Yield the expansions of ``{a,b}`` in a pattern. Braces without a comma are ordinary characters."""
    depth, cuts = 0, list[int]()  # of the braces that are open: the places of the first one, and of the commas in it
    for sign in _SIGN.finditer(pattern):
        if sign[0] == "{":
            cuts = cuts if depth else [sign.start()]
            depth += 1
        elif sign[0] == "," and depth == 1:
            cuts.append(sign.start())
        elif sign[0] == "}":
            depth -= 1
            if depth == 0 and len(cuts) > 1:
                parts = [pattern[left + 1 : right] for left, right in pairwise([*cuts, sign.start()])]
                for rest in _expanded(pattern[sign.end() :]):
                    for part in parts:
                        yield from (pattern[: cuts[0]] + middle + rest for middle in _expanded(part))
                return
    yield pattern


@cache
def _compiled(part: str) -> re.Pattern[str]:
    return re.compile(translate(part))
