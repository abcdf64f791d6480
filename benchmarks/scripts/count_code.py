"""Counts the code: files, lines, function lengths, class names, and the calls from `LLM.generate` to the first attention.

Run from the repository's root: `python -m benchmarks.scripts.count_code`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import median, quantiles
from types import FrameType

import torch

import eyas
from eyas import LLM, SamplingParams

PACKAGES = ("eyas", "services")
GENERATED = Path("eyas/v1")
MODEL = "models/demo/target"
DRAFT_MODEL = "models/demo/eagle3"
COMPREHENSION = re.compile(r"(\.<locals>|\.<(genexpr|\w+comp)>)+$")


def sources(package: str) -> list[Path]:
    """The Python files of a package, without generated stubs; the link eyas/services is not followed."""
    files = [path for path in Path(package).rglob("*.py") if not path.is_relative_to(GENERATED)]
    return sorted(path for path in files if not path.is_relative_to("eyas/services"))


def function_lengths(tree: ast.Module) -> list[int]:
    """Lines of every function, from `def` to its last line."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]


def public_classes(tree: ast.Module) -> list[str]:
    """Names of the module's own classes that do not begin with an underscore."""
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def calls_to_attention(llm: LLM) -> list[str]:
    """Distinct functions of Eyas that run from `LLM.generate` to the first call of attention, torch's or compiled, in order.

    Comprehensions and generator expressions count for the function that they stand in. llm: one that has not generated
    yet, because a cached prefix adds calls.
    """
    folder, params = str(Path(eyas.__file__).parent), SamplingParams(max_tokens=2, temperature=0.0)
    calls: dict[str, None] = {}
    attention = torch.nn.functional.scaled_dot_product_attention
    reached = False

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal reached
        reached = reached or (event == "c_call" and argument is attention)
        if event == "call" and not reached and frame.f_code.co_filename.startswith(folder):
            module = frame.f_globals.get("__name__", "")
            name = COMPREHENSION.sub("", frame.f_code.co_qualname)
            calls.setdefault(f"{module}.{name}")
            reached = name in ("CpuLayer.run", "CpuStack.run")  # compiled attention is no call that a profile shows

    sys.setprofile(profile)
    try:
        llm.generate([[7, 8, 9]], params)
    finally:
        sys.setprofile(None)
    assert reached, "generation called no attention"
    return list(calls)


def main() -> None:
    """Print the counts."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for package in PACKAGES for path in sources(package)}
    for package in PACKAGES:
        lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in sources(package)]
        short = sum(count < 40 for count in lines)
        print(f"{package}: {len(lines)} files, {sum(lines)} lines; longest {max(lines)}, {short} under 40 lines")
    lengths = [length for tree in trees.values() for length in function_lengths(tree)]
    p90 = quantiles(lengths, n=10)[-1]
    print(f"functions: {len(lengths)}, median {median(lengths):.0f}, p90 {p90:.0f}, longest {max(lengths)} lines")
    names = Counter(name for tree in trees.values() for name in public_classes(tree))
    twice = sorted(name for name, count in names.items() if count > 1)
    print(f"public class names that exist twice: {len(twice)} {' '.join(twice)}".rstrip())
    calls = calls_to_attention(LLM(MODEL, DRAFT_MODEL, device="cpu"))
    print(f"functions from LLM.generate to the first attention: {len(calls)}")
    if "--calls" in sys.argv[1:]:
        print("\n".join(f"  {call}" for call in calls))


if __name__ == "__main__":
    main()
