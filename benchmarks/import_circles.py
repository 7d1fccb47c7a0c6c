"""The imports among the modules of a source, and the circles in them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from python_source import FUNCTION, Module, Source

WHEN_LOADED, IN_FUNCTIONS, FOR_TYPES = "when loaded", "in functions", "for types"


def find_imports(source: Source) -> set[tuple[str, str, str]]:
    """Return all imports of modules of a source: who, whom, and when."""
    return {
        (module.name, target, when)
        for module in source.modules.values()
        for named, when in imported_names(module)
        for target in loaded_by(source, module.name, named)
        if target != module.name
    }


def loaded_by(source: Source, importer: str, named: str) -> Iterator[str]:
    """Yield the modules that an import of a module, or of a name in one, loads."""
    parts = named.split(".")
    known = [name for end in range(1, len(parts) + 1) if (name := ".".join(parts[:end])) in source.modules]
    for index, name in enumerate(known):
        # Packages around the importer are being loaded already, unless it asks them for something.
        if index == len(known) - 1 or not importer.startswith(f"{name}."):
            yield name


def imported_names(module: Module) -> Iterator[tuple[str, str]]:
    """Yield the absolute names that a module imports, and when it does."""

    def visit(node: ast.AST, when: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{module.origin(node)}.{alias.name}", when) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((str(item.value), when) for item in node.args if isinstance(item, ast.Constant))
        if isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING":
            for statement in node.body:
                yield from visit(statement, FOR_TYPES)
            rest: Iterable[ast.AST] = node.orelse
        else:
            rest = ast.iter_child_nodes(node)
        inside = IN_FUNCTIONS if isinstance(node, (*FUNCTION, ast.Lambda)) and when == WHEN_LOADED else when
        for child in rest:
            yield from visit(child, inside)

    return visit(module.tree, WHEN_LOADED)


def find_circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the strongly connected components of two and more, largest first (Tarjan, without recursion)."""
    following: dict[str, list[str]] = {}
    for one, other in sorted(set(edges)):
        following.setdefault(one, []).append(other)
        following.setdefault(other, [])
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_nodes: list[str] = []
    circles: list[list[str]] = []
    for root, first in following.items():
        work = [] if root in index else [(root, iter(first))]
        while work:
            node, rest = work[-1]
            if node not in index:
                index[node] = lowest[node] = len(index)
                open_nodes.append(node)
            for other in rest:
                if other not in index:
                    work.append((other, iter(following[other])))
                    break
                if other in open_nodes:
                    lowest[node] = min(lowest[node], index[other])
            else:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[node])
                if lowest[node] == index[node]:
                    start = open_nodes.index(node)
                    circles.append(sorted(open_nodes[start:]))
                    del open_nodes[start:]
    return sorted((circle for circle in circles if len(circle) > 1), key=lambda circle: (-len(circle), circle))


def count_circles(source: Source) -> dict[str, list[list[str]]]:
    """Find the circles among modules, by which imports count, and among packages."""
    edges = find_imports(source)
    times = [WHEN_LOADED, IN_FUNCTIONS, FOR_TYPES]
    among_modules = [
        find_circles((one, other) for one, other, when in edges if when in times[:end]) for end in (1, 2, 3)
    ]
    layer = {module.name: module.package for module in source.modules.values()}
    # The modules directly in the root package are no layer together: each stands for itself.
    layer |= {name: name for name, package in layer.items() if "." not in package}
    among_packages = [
        find_circles((layer[one], layer[other]) for one, other, when in edges if when in times[:end])
        for end in (1, len(times))
    ]
    return {
        "modules_when_loaded": among_modules[0],
        "modules_with_functions": among_modules[1],
        "modules_with_types": among_modules[2],
        "packages_when_loaded": among_packages[0],
        "packages_with_all": among_packages[1],
    }
