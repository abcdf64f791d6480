"""Counts the code: files, lines, function lengths, class names, and what two journeys through it cross.

Run from the repository's root: `python -m benchmarks.scripts.count_code`.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from statistics import median, quantiles

from benchmarks.scripts.journeys import generate_journey, step_journey

PACKAGES = ("eyas", "services")
GENERATED = Path("eyas/v1")
NAMED_TUPLES = ("_replace", "_asdict", "_fields")  # public names of theirs


def sources(package: str, root: Path = Path()) -> list[Path]:
    """Return the Python files of a package, without generated stubs; the link eyas/services is not followed."""
    skipped = root / GENERATED, root / "eyas" / "services"
    files = (root / package).rglob("*.py")
    return sorted(path for path in files if not any(path.is_relative_to(folder) for folder in skipped))


def function_lengths(tree: ast.Module) -> list[int]:
    """Return the lines of every function, from `def` to its last line."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]


def public_classes(tree: ast.Module) -> list[str]:
    """Return the names of the module's own classes that do not begin with an underscore."""
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def is_parallel(first: ast.expr, other: ast.expr) -> bool:
    """Return whether two values of a tuple assignment are of one kind: calls of a function, entries of an object, names."""
    match first, other:
        case ast.Call(), ast.Call():
            return _function(first) == _function(other)
        case ast.Attribute(value=one), ast.Attribute(value=two):
            return ast.dump(one) == ast.dump(two)
        case ast.Constant(), ast.Constant():
            return type(first.value) is type(other.value)
        case _:
            return type(first) is type(other)


def _function(call: ast.Call) -> str:
    """Return the name of a function or method, without its object."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.dump(call.func)


def unrelated_assignments(tree: ast.Module) -> list[int]:
    """Return the lines of tuple assignments whose values have nothing in common. An exchange or a step, `a, b = b, a + b`,
    is fine.
    """
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Tuple() as target], value=ast.Tuple(elts=[first, *others])):
                changed = {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
                used = {name.id for value in (first, *others) for name in ast.walk(value) if isinstance(name, ast.Name)}
                if not (changed - {"self"}) & used and not all(is_parallel(first, other) for other in others):
                    found.append(node.lineno)
    return found


def private_uses(tree: ast.Module) -> list[str]:
    """Return the private names that a test reads, imports from the product or replaces; an object's own ones are fine."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                continue
            case ast.Attribute(attr=name):
                found.append(name)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in (*PACKAGES, "benchmarks"):
                found += [alias.name for alias in node.names]
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr")):
                texts = [own.value for own in node.args if isinstance(own, ast.Constant) and isinstance(own.value, str)]
                found += [text.rpartition(".")[2] for text in texts]
    return [name for name in found if name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLES]


def package_lines(root: Path = Path()) -> dict[str, int]:
    """Return the lines of each package of the product, of its modules beside them, and of tests and benchmarks as wholes."""
    lines = Counter[str]()
    for top in (*PACKAGES, "tests", "benchmarks"):
        for path in sources(top, root):
            parts = path.relative_to(root).parts
            package = top if len(parts) == 2 or top not in PACKAGES else "/".join(parts[:2])
            lines[package] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(sorted(lines.items()))


def main() -> None:
    """Print the counts."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for package in PACKAGES for path in sources(package)}
    for package in PACKAGES:
        lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in sources(package)]
        print(f"{package}: {len(lines)} files, {sum(lines)} lines; longest {max(lines)}")
    print("lines of packages: " + ", ".join(f"{package} {count}" for package, count in package_lines().items()))
    lengths = [length for tree in trees.values() for length in function_lengths(tree)]
    p90 = quantiles(lengths, n=10)[-1]
    print(f"functions: {len(lengths)}, median {median(lengths):.0f}, p90 {p90:.0f}, longest {max(lengths)} lines")
    names = Counter(name for tree in trees.values() for name in public_classes(tree))
    twice = sorted(name for name, count in names.items() if count > 1)
    print(f"public class names that exist twice: {len(twice)} {' '.join(twice)}".rstrip())
    unrelated = sum(len(unrelated_assignments(tree)) for tree in trees.values())
    print(f"tuple assignments of unrelated things: {unrelated}")
    journeys = {
        "LLM.generate of four tokens with a drafter": generate_journey(),
        "a steady step through services": step_journey(),
    }
    for title, journey in journeys.items():
        print(f"{title}: {len(journey.functions)} functions in {len(journey.files)} files")
        for file, count in journey.files.items():
            print(f"  {count:4} {file}")


if __name__ == "__main__":
    main()
