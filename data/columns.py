"""Selects the column of a table that holds the text, and counts the rows that have none."""

from collections.abc import Iterator
from typing import Any

from data.files import Report, UnknownColumn
from data.readers import Row
from errors import UserError

ROWS_WITHOUT = 1000  # a column missing from this many first rows is not in the table


def text_column(row: dict[str, Any], asked: str | None, find: bool) -> str | None:
    """The name of the text's column: `asked` if given; else `text`; else, if `find`, the only
    column that holds text in this row. None if there is no such column."""
    if asked is not None or "text" in row:
        return asked or "text"
    texts = [
        name for name, value in row.items() if isinstance(value, str) and not _is_number(value)
    ]
    return texts[0] if find and len(texts) == 1 else None


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
    column, seen = None, False
    without: list[UserError] = []  # the rows before the first that has the column
    for where, row in table:
        if isinstance(row, UserError):
            report.fault("damaged_rows", row)
            continue
        column = column or text_column(row, asked, find)
        if column not in ("text", None) and asked is None and "text" in row:
            why = f"{where} has a column 'text', and the rows before it do not"
            remedy = f"choose one: --text-field {column}, or --text-field text"
            raise UnknownColumn("--source", name, why, remedy)
        if column not in row:
            why = f"{where} of {name} has no such column"
            remedy = "correct the name or that row, or leave out all such rows: --skip missing"
            error = UserError("--text-field", column or "text", why, remedy)
            if seen or (find and "missing" in report.skip):
                report.fault("missing_texts", error)
            elif len(without) == ROWS_WITHOUT:
                raise no_column(name, row, asked)
            else:
                without.append(error)
            continue
        while not seen and without:
            report.fault("missing_texts", without.pop(0))
        seen, text = True, row[column]
        if text is None:
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
    if without:
        raise no_column(name, row, asked)


def no_column(name: str, row: Row, asked: str | None) -> UserError:
    columns = ", ".join(map(str, row)) if isinstance(row, dict) else ""
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
