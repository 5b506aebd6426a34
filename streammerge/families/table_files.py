"""Read family tables from TOML files, and find the one for a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from streammerge.errors import UnsupportedError, UsageError
from streammerge.families.expressions import names_in
from streammerge.families.layouts import LAYOUTS
from streammerge.families.table import Block, Row, Table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["ENTRY_POINTS", "find_table", "read_table"]

ENTRY_POINTS = "streammerge.families"
_OWN = Path(__file__).parent / "tables"
_TOP = {"framework", "model_types", "extends", "names", "fields", "block", "remove"}
_BLOCK = {"from", "to", "rows", "count", "offset", "optional"}
_ROW = {"from", "to", "layout", "shape", "sections", "when", "optional", "drop", "last"}

Content = dict[str, Any]


def find_table(framework: str, model_type: str | None, own: Sequence[Path] = ()) -> Table:
    """The table for a model type; a user's own come before plugins', and these before the package's.

    Args:
        own: files named by the user.

    Raises:
        UnsupportedError: there is none.
        UsageError: a table is wrong.
    """
    known: set[str] = set()
    for table in (*map(read_table, own), *_installed()):
        if table.framework == framework:
            if model_type in table.model_types:
                return table
            known.update(table.model_types)
    raise UnsupportedError(
        f"{framework} parameters of the model type {model_type!r} have no known Hugging Face names (known: "
        f"{', '.join(sorted(known))}); a table of your own can be given with --family FILE, see docs/add-a-family.md"
    )


@lru_cache(maxsize=1)
def _installed() -> tuple[Table, ...]:
    plugins = [Path(point.load()) for point in metadata.entry_points(group=ENTRY_POINTS)]
    return tuple(read_table(path) for path in (*plugins, *sorted(_OWN.glob("*.toml"))))


def read_table(path: Path) -> Table:
    """Read a table.

    Raises:
        UsageError: it cannot be read, or something in it has no meaning.
    """
    content = _extended(path, ())
    where = f"family table {path}"
    fields = {name: (one,) if isinstance(one, str) else tuple(one) for name, one in content.get("fields", {}).items()}
    for text in (text for texts in fields.values() for text in texts):
        _check_expression(text, where)
    rows = list(_rows(content, where))
    return Table(
        framework=str(content.get("framework", "megatron")),
        model_types=tuple(content.get("model_types", ())),
        fields=fields,
        rows=tuple(sorted(rows, key=lambda row: row.last)),
        origin=str(path),
    )


def _extended(path: Path, above: tuple[Path, ...]) -> Content:
    """The file's content over that of the table that it extends, if any."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise UsageError(f"family table {path} cannot be read: {fault}") from fault
    for key, rows in content.items():
        if key not in _TOP - {"block"} and not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
            raise UsageError(f"family table {path}: {key} is no list of tables")
    parent = content.pop("extends", None)
    if parent is None:
        return content
    if not isinstance(parent, str):
        raise UsageError(f"family table {path}: extends names one table")
    beside = path.parent / f"{parent}.toml"
    base = beside if beside.is_file() else _OWN / f"{parent}.toml"
    if base.resolve() in above or not base.is_file():
        raise UsageError(f"family table {path} extends {parent}, which is not there (or extends this one)")
    return _over(_extended(base, (*above, path.resolve())), content)


def _over(base: Content, content: Content) -> Content:
    """Rows replace those of the same source, names and fields those of the same name."""
    merged = {**base, **content}
    for key in ("names", "fields"):
        merged[key] = {**base.get(key, {}), **content.get(key, {})}
    removed = set(content.get("remove", ()))
    for key in {*base, *content} - _TOP | {"block"}:
        own = content.get(key, [])
        replaced = {str(row.get("from")) for row in own} | removed
        merged[key] = [row for row in base.get(key, []) if str(row.get("from")) not in replaced] + own
    return merged


def _rows(content: Content, where: str) -> Iterator[Row]:
    names = content.get("names", {})
    for raw in content.get("tensor", []):
        yield _row(raw, names, where, "", "", None)
    for block in content.get("block", []):
        if not {"from", "to", "count"} <= block.keys() <= _BLOCK:
            raise UsageError(f"{where}: a block has from, to, count, and may have rows, offset, optional: {block}")
        made = Block(str(block["count"]), str(block.get("offset", "0")), bool(block.get("optional")))
        for text in (made.count, made.offset):
            _check_expression(text, where)
        for raw in content.get(block.get("rows", "layer"), []):
            yield _row(raw, names, where, block["from"], block["to"], made)


def _row(raw: Content, names: Mapping[str, str], where: str, before: str, target: str, block: Block | None) -> Row:
    if "from" not in raw or not raw.keys() <= _ROW:
        raise UsageError(f"{where}: a row needs from, and may have {', '.join(sorted(_ROW - {'from'}))}: {raw}")
    row = Row(
        sources=tuple(before + one for one in _listed(raw["from"])),
        targets=tuple(_named(target + one, names) for one in _listed(raw.get("to", []))),
        layout=str(raw.get("layout", "copy")),
        shape=tuple(map(str, raw.get("shape", ()))),
        sections={str(suffix): str(text) for suffix, text in raw.get("sections", {}).items()},
        when=str(raw.get("when", "True")),
        optional=str(raw.get("optional", "False")),
        drop=str(raw.get("drop", "")),
        last=bool(raw.get("last")),
        block=block,
    )
    if bool(row.targets) == bool(row.drop):
        raise UsageError(f"{where}: {row.sources[0]} needs either a target (to) or a reason to drop it (drop)")
    if row.layout not in {*LAYOUTS, "plus_one"}:
        raise UsageError(f"{where}: {row.sources[0]} has layout {row.layout!r}; there are {', '.join(LAYOUTS)}")
    for text in (*row.shape, *row.sections.values(), row.when, row.optional):
        _check_expression(text, f"{where}: {row.sources[0]}")
    return row


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(one) for one in value]


def _named(target: str, names: Mapping[str, str]) -> str:
    for name, text in names.items():
        target = target.replace("{" + name + "}", text)
    return target


def _check_expression(text: str, where: str) -> None:
    try:
        names_in(text)
    except UsageError as fault:
        raise UsageError(f"{where}: {fault}") from fault
