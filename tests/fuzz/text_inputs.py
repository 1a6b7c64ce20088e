"""Text: each line is a record, or the whole file is one."""

import random
from dataclasses import dataclass

from tests.fuzz import values
from tests.fuzz.files import END, Damaged, File, text_ends, tuning
from tests.fuzz.harness import Column, Declared, Format, Input, Record, Verdict
from tidegate.jobs import Files


@dataclass(frozen=True)
class TextDeclared(Declared):
    line_end: str | None = None
    is_whole_text: bool = False


class Text(Format):
    name = "text"

    def declare(self, draw: random.Random) -> TextDeclared:
        file = File.drawn(draw)
        line_end = draw.choice([None, None, "\n", "\r\n", "\r", "--"])
        whole = draw.random() < 0.2
        options = {**file.options, **({"lineSep": line_end} if line_end else {}), **({"wholetext": "true"} if whole else {})}

        def source(inputs: int) -> Files:
            return Files("inbox", format="text", options=options, max_files=inputs)

        return TextDeclared(
            source, [Column("value", "string")], f"options={options}", file=file,
            line_end=line_end, is_whole_text=whole, **tuning(draw),
        )  # fmt: skip

    def make(self, draw: random.Random, declared: TextDeclared, name: str) -> Input:  # type: ignore[override]
        name += f".txt{declared.file.suffix}"
        ends = [declared.line_end] if declared.line_end else draw.choice([text_ends(draw), ["\n", "\r", "\r\n"]])
        lines = [values.text_of(draw) for _ in range(draw.choice([0, 1, 2, 5, 20]))]
        text = "".join(line + draw.choice(ends) for line in lines)
        if draw.random() < 0.3:
            text = text.removesuffix(ends[0])
        return read(name, declared.file.packed(draw, text), declared)


def read(name: str, content: bytes, declared: TextDeclared) -> Input:
    """Read a file as the oracle does: text after the last line end is a line, unless it is empty."""
    try:
        text = declared.file.text_in(content)
    except (Damaged, UnicodeError):
        return Input(name, content, is_whole=False)
    lines = [text] if declared.is_whole_text else text.split(declared.line_end) if declared.line_end else END.split(text)
    if not lines[-1]:
        lines.pop()
    records = []
    for number, line in enumerate(lines, start=1):
        verdict = Verdict.REFUSED if "\0" in line else Verdict.COUNTS
        records.append(Record(f"{name}, line {number}", verdict, (line,), line))
    return Input(name, content, records)
