"""Selects the column of a table that holds the text, and counts the rows that have none."""

from collections.abc import Iterator
from typing import Any

from data.files import Report, UnknownColumn
from data.readers import Row
from errors import UserError

ROWS_WITHOUT = 1000  # a column missing from this many first rows is not in the table


def text_columns(row: dict[str, Any], asked: str | None) -> list[str]:
    """The columns of the row that may hold the text: `asked` if given; else `text`; else each
    column that holds text in this row."""
    if asked is not None or "text" in row:
        return [asked or "text"]
    return [name for name, value in row.items() if isinstance(value, str) and not _is_number(value)]


def row_texts(
    table: Iterator[tuple[str, Row]],
    name: str,
    asked: str | None,
    report: Report,
    find: bool = True,
) -> Iterator[tuple[str, str]]:
    """Yields (text, column) for every row that has text, and counts the others in `report`.

    find: whether a column other than `text` may be chosen if none was asked for.
    """
    for where, row, column in _with_column(table, name, asked, report, find):
        text = row.get(column)
        if column not in row:
            why = f"{where} of {name} has no such column"
            remedy = "correct the name or that row, or leave out all such rows: --skip missing"
            report.fault("missing_texts", UserError("--text-field", column, why, remedy))
        elif text is None:
            report.counts["null_texts"] += 1
        elif not isinstance(text, str):
            why = f"{where} of {name} holds {type(text).__name__}, not text"
            remedy = "name the column that holds the text, or correct that row"
            remedy = f"{remedy}, or leave out all such rows: --skip damaged"
            report.fault("damaged_rows", UserError("--text-field", column, why, remedy))
        elif text:
            yield text, column
        else:
            report.counts["empty_documents"] += 1


def _with_column(
    table: Iterator[tuple[str, Row]], name: str, asked: str | None, report: Report, find: bool
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields (location, row, column of the text) for every row that is not damaged. Rows are kept
    until one shows the column, since it may be null or a number in them. Raises UnknownColumn if
    none does."""
    column, seen, row = None, False, None
    before: list[tuple[str, dict[str, Any]]] = []
    for number, (where, found) in enumerate(table):
        if isinstance(found, UserError):
            report.fault("damaged_rows", found)
            continue
        row = found
        if column is None:
            may_be = text_columns(row, asked)
            if len(may_be) == 1 and (find or asked or may_be == ["text"]):
                column = may_be[0]
            find = find and len(may_be) <= 1  # nor may a later row choose among these
        # another column than `text` that begins later is ignored
        early = number < ROWS_WITHOUT or "text" in row
        if column not in ("text", None) and asked is None and early:
            for other in sorted({*text_columns(row, None)} - {column}):
                why = f"{where} has a column {other!r}, and the rows before it have no text in it"
                remedy = f"choose one: --text-field {column}, or --text-field {other}"
                raise UnknownColumn("--source", name, why, remedy)
        before.append((where, row))
        seen = seen or column in row
        if not seen and len(before) <= ROWS_WITHOUT:
            continue
        if column is None or not (seen or "missing" in report.skip):
            break
        for each in before:
            yield *each, column
        before.clear()
    if row is not None and not seen:
        raise no_column(name, row, asked)


def no_column(name: str, row: dict[str, Any], asked: str | None) -> UserError:
    columns = ", ".join(map(str, row))
    columns = columns if len(columns) < 300 else columns[:300] + "…"
    why = f"the rows of {name} have no such column"
    remedy = f"set --text-field to one of: {columns}; or leave that file out"
    return UnknownColumn("--text-field", asked or "text", why, remedy)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return not text.strip()
    return True
