"""Finds the private names of other packages that the source uses."""

import ast
import itertools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "lightning_unified"
PUBLIC = {"_asdict", "_fields", "_make", "_replace"}  # documented methods of named tuples


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != "" and name not in PUBLIC


def uses(root: Path) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return imported private names, in full, and private attributes of others' objects.

    Each has the files that use it. An attribute of `self`, `cls` or `super()` is ours if the package defines its name, and an attribute of
    another object if the same file does.
    """
    files = {
        path.relative_to(root).as_posix(): list(ast.walk(ast.parse(path.read_text("utf-8"))))
        for path in root.rglob("*.py")
    }
    defined = {path: set(_defined(nodes)) for path, nodes in files.items()}
    ours = set().union(*defined.values())
    imported: dict[str, set[str]] = defaultdict(set)
    attributes: dict[str, set[str]] = defaultdict(set)
    for path, nodes in files.items():
        names = dict(_imports(nodes))
        for name in names.values():
            if _is_foreign(name):
                imported[name].add(path)
        for own, name in _attributes(nodes, names):
            if "." in name and _is_foreign(name):
                imported[name].add(path)
            elif "." not in name and name not in (ours if own else defined[path]):
                attributes[name].add(path)
    return imported, attributes


def _is_foreign(name: str) -> bool:
    return not name.startswith(PACKAGE) and any(map(is_private, name.split(".")))


def _defined(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr


def _imports(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield each name that an import binds, with what it stands for."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for one in node.names:
                yield (one.asname, one.name) if one.asname else (one.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"


def _attributes(nodes: list[ast.AST], names: dict[str, str]) -> Iterator[tuple[bool, str]]:
    """Yield the private attributes, and whether each belongs to `self`, `cls` or `super()`.

    Attributes of imported modules and classes have their dots.
    """
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            dotted = _dotted(node, names)
            if dotted is None:
                if is_private(node.attr):
                    yield _is_own(node.value), node.attr
            elif id(node) not in inner and (is_private(node.attr) or not _is_foreign(_base(node, names))):
                yield False, dotted
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ACCESS:
            owner, name = itertools.islice(itertools.chain(node.args, (None, None)), 2)
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                yield _is_own(owner), str(name.value)


_ACCESS = ("getattr", "hasattr", "setattr", "delattr")


def _dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, names)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def _base(node: ast.expr, names: dict[str, str]) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return names[node.id] if isinstance(node, ast.Name) else ""


def _is_own(owner: ast.expr | None) -> bool:
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name):
        return owner.func.id == "super"
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")
