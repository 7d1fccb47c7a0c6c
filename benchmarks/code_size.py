"""Count the source: lines, comments, untyped mappings, long node functions and import circles.

    python benchmarks/code_size.py [PATH] [--revision REV [REV ...]] [--longest 5] [--json]

Each revision is a column; ``.`` stands for the files as they lie. A git revision is read from the repository and is not
checked out. Without ``--revision`` the files as they lie are counted.

Lines of code are lines with a token that is neither a comment nor the docstring of a module, class or function; other
strings are code, over all their lines. A comment line holds a comment and nothing else. An untyped mapping is a mapping
in an annotation whose values are ``Any`` or ``object`` or are not named; a use of an alias on module level for a type
with one inside counts too, also where the alias is imported. The import graph has an edge for every import of a module
of the source, and for every package that is loaded on the way to it; a circle is a strongly connected component.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from import_circles import count_circles
from python_source import AS_THEY_LIE, FUNCTION, Module, Source, read_source

PROJECT = Path(__file__).resolve().parents[1]
LONG_FILE_LINES = 400
LONG_NODE_LINES = 20

SPELLINGS = ("dict[str, Any]", "Mapping[str, Any]")


def count_untyped(source: Source, module: Module) -> Counter[str]:
    """Count the untyped mappings in a module's annotations."""
    found: Counter[str] = Counter()
    for node in ast.walk(module.tree):
        annotation = node.returns if isinstance(node, FUNCTION) else getattr(node, "annotation", None)
        if annotation is not None:
            found += source.untyped_in(annotation, module)
    return found


def long_nodes(source: Source) -> list[dict[str, Any]]:
    """List the long functions of the files ``pipelines/*/nodes.py``, by lines of code with the signature."""
    found = []
    for module in source.modules.values():
        if module.path.match("pipelines/*/nodes.py"):
            for node in ast.walk(module.tree):
                if isinstance(node, FUNCTION):
                    lines = module.code_lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
                    body = lines & set(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))
                    if len(lines) > LONG_NODE_LINES:
                        found.append({"function": f"{module.name}.{node.name}", "lines": len(lines), "body": len(body)})
    return sorted(found, key=lambda entry: (-entry["lines"], entry["function"]))


def tally(modules: list[Module], source: Source) -> dict[str, Any]:
    """Count a few modules."""
    code, comments = sum(len(m.code_lines) for m in modules), sum(len(m.comment_lines) for m in modules)
    untyped = sum((count_untyped(source, module) for module in modules), Counter[str]())
    return {
        "files": len(modules),
        "lines": sum(module.num_lines for module in modules),
        "code_lines": code,
        "comment_lines": comments,
        "comments_per_100_code_lines": round(100 * comments / code, 2) if code else 0.0,
        "untyped_mappings": untyped.total(),
        "untyped_mappings_by_alias": untyped["by alias"],
    }


def count(source: Source, longest: int) -> dict[str, Any]:
    """Count everything."""
    modules = sorted(source.modules.values(), key=lambda module: (-module.num_lines, module.path))
    packages = sorted({module.package for module in modules})
    return tally(modules, source) | {
        "untyped_mappings_in_text": sum(module.text.count(words) for module in modules for words in SPELLINGS),
        "files_over_400_lines": sum(module.num_lines > LONG_FILE_LINES for module in modules),
        "longest_files": {str(module.path): module.num_lines for module in modules[:longest]},
        "nodes_over_20_lines": long_nodes(source),
        "circles": count_circles(source),
        "packages": {name: tally([m for m in modules if m.package == name], source) for name in packages},
    }


ROWS = {
    "files": "files",
    "files over 400 lines": "files_over_400_lines",
    "lines": "lines",
    "code lines": "code_lines",
    "comment lines": "comment_lines",
    "comments per 100 code lines": "comments_per_100_code_lines",
    "untyped mappings in annotations": "untyped_mappings",
    "  of them by alias": "untyped_mappings_by_alias",
    "dict[str, Any], Mapping[str, Any] in the text": "untyped_mappings_in_text",
    "functions over 20 code lines in nodes.py": "nodes_over_20_lines",
}
CIRCLE_ROWS = {
    "modules in circles when loaded": "modules_when_loaded",
    "  with imports in functions": "modules_with_functions",
    "  with imports for types": "modules_with_types",
    "packages in circles when loaded": "packages_when_loaded",
    "  with all imports": "packages_with_all",
}
PACKAGE_FIGURES = ("files", "code_lines", "comments_per_100_code_lines", "untyped_mappings")


def write_table(rows: list[list[str]]) -> str:
    """Line columns up: words to the left, figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        row[0].ljust(widths[0])
        + "".join(f"  {cell.rjust(width)}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def write_figure(value: Any) -> str:
    """Write a count, a share, or how many there are in a list."""
    return f"{len(value) if isinstance(value, list) else value:,}"


def write_circles(circles: list[list[str]]) -> str:
    """Write how many modules are in how many circles."""
    return f"{sum(map(len, circles))} in {len(circles)}" if circles else "0"


def write_report(counts: dict[str, dict[str, Any]]) -> str:
    """Write the tables: everything by revision, packages, and what is listed by name."""
    table = [["", *counts]]
    table += [[words, *(write_figure(c[key]) for c in counts.values())] for words, key in ROWS.items()]
    table += [
        [words, *(write_circles(c["circles"][key]) for c in counts.values())] for words, key in CIRCLE_ROWS.items()
    ]
    text = write_table(table)
    for revision, counted in counts.items():
        packages = [["package", "files", "code", "comments/100", "untyped"]]
        packages += [
            [name, *(write_figure(p[key]) for key in PACKAGE_FIGURES)] for name, p in counted["packages"].items()
        ]
        text += f"\n{revision}\n{write_table(packages)}\nlongest files\n"
        text += "".join(f"  {lines:,} {name}\n" for name, lines in counted["longest_files"].items())
        text += "functions in nodes.py: code lines, of them in the body\n"
        text += "".join(f"  {n['lines']} {n['body']} {n['function']}\n" for n in counted["nodes_over_20_lines"])
        for words, key in (("modules", "modules_with_types"), ("packages", "packages_with_all")):
            text += "".join(f"circle of {words}: {', '.join(circle)}\n" for circle in counted["circles"][key])
    return text


def main() -> None:
    """Count the revisions and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=Path, default=PROJECT / "src", help="folder of the source")
    parser.add_argument("--revision", nargs="+", action="extend", metavar="REV", help="git revisions; . for the files")
    parser.add_argument("--longest", type=int, default=5, help="how many of the longest files are listed")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    path = options.path.resolve()
    counts = {
        revision: count(read_source(path, revision), options.longest) for revision in options.revision or [AS_THEY_LIE]
    }
    sys.stdout.write(json.dumps(counts, indent=2) + "\n" if options.json else write_report(counts))


if __name__ == "__main__":
    main()
