"""Counts on the `meta` device what a GPU would launch.

The kernels of Triton are replaced by recorders, so that the launch arguments are those of the code itself.
"""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PACKAGE = Path(__file__).parents[3] / "eyas"
# Modules with kernels. Those that they launch are the callables with one of Triton's two kinds of function.
KERNEL_FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if "@triton.jit" in path.read_text()]
KERNEL_MODULES = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in KERNEL_FILES]
# Operations that launch nothing: views, and memory that is not written.
FREE = {
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "expand", "unsqueeze", "squeeze", "slice", "select",
    "split", "chunk", "unbind", "detach", "alias", "as_strided", "empty", "empty_like", "empty_strided", "new_empty",
    "_reshape_alias", "split_with_sizes", "lift_fresh", "view_as", "diagonal", "unfold", "view_dtype",
}  # fmt: skip
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "_product"}
GATHERS = {"embedding", "index", "index_select", "gather"}
# Arguments of kernels: the KV cache, words with prefixes and masks, an embedding, and logits that only rows of flat
# distributions are read from again.
READ_IN_PART = {"keys", "values", "words", "masks", "embedding", "reread"}
META = torch.device("meta")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel of Triton: the function, its arguments by name, and the compiler's options."""

    function: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors but those that a launch reads in part, in a size that no shape shows."""
        tensors = {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}
        return sum(t.nbytes for name, t in tensors.items() if name not in READ_IN_PART)


def keys_read(launch: Launch) -> int:
    """Keys that a launch of the attention kernel reads, on a device whose words can be read: each once for each tile."""
    tiles = launch.arguments["tiles"]
    return int((tiles[:, 4] + tiles[:, 7] - tiles[:, 8]).sum())


def longest_part(launch: Launch) -> int:
    """Keys that one program of such a launch reads at most, as the kernel cuts them."""
    values = launch.arguments
    keys = values["tiles"][:, 4] + values["tiles"][:, 7] - values["tiles"][:, 8]
    even, least = (-(-keys // values[name]) for name in ("even_splits", "splits"))
    return int(torch.maximum(least, even.clamp(max=values["LONG_PART"])).max())


class _Recorder:
    """Takes the place of a kernel."""

    def __init__(self, function: Any, record: Callable[[Launch], None]) -> None:
        self._function, self._record = function, record

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        names = self._function.arg_names

        def launch(*args: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in list(named) if name not in names}
            self._record(Launch(self._function, dict(zip(names, args, strict=False)) | named, options))

        return launch


def launched_kernels() -> set[str]:
    """The kernels that modules launch, as `kernel[grid](...)`; the other functions of Triton are called by these."""
    found = set()
    for path in KERNEL_FILES:
        tree = ast.parse(path.read_text())
        kernels = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}
        calls = (
            node.func.value for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        )
        found |= kernels & {value.id for value in calls if isinstance(value, ast.Name)}
    return found


@contextmanager
def recorded(record: Callable[[Launch], None]) -> Iterator[None]:
    """Inside the context no kernel runs; each launch is recorded instead."""
    from triton.runtime.jit import KernelInterface

    kept: list[tuple[Any, str, Any]] = []
    for module in map(importlib.import_module, KERNEL_MODULES):
        kept += [(module, name, value) for name, value in vars(module).items() if isinstance(value, KernelInterface)]
    for module, name, value in kept:
        setattr(module, name, _Recorder(value, record))
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


class Launches(TorchDispatchMode):
    """Counts launches and bytes of memory traffic of what runs inside it on the `meta` device.

    num: launches. product_bytes: read and written by matrix products. other_bytes: by all else. by_name: launches by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num = self.product_bytes = self.other_bytes = 0
        self.by_name: Counter[str] = Counter()
        self.bytes_by_name: Counter[str] = Counter()
        self._recording: Any = None
        self._empty_parts = 0.0

    def __enter__(self) -> Launches:
        self._recording = recorded(self._add_launch)
        self._recording.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._recording.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if name not in FREE and any(x.device == META for x in written) and not _is_view(name, read, written):
            self._add(name, _traffic(name, read, written))
        return out

    def _add_launch(self, launch: Launch) -> None:
        """Only tiles with long prefixes have more parts than `even_splits`; they are few, and so not counted."""
        if "even_splits" in launch.arguments:
            self._empty_parts = 1 - launch.arguments["even_splits"] / launch.arguments["splits"]
        unused = self._empty_parts * launch.arguments["partials"].nbytes if "partials" in launch.arguments else 0
        self._add(launch.function.__name__, launch.nbytes - int(unused))

    def _add(self, name: str, nbytes: int) -> None:
        self.num += 1
        self.by_name[name] += 1
        self.bytes_by_name[name] += nbytes
        if name in PRODUCTS:
            self.product_bytes += nbytes
        else:
            self.other_bytes += nbytes


def storage_of(x: Tensor) -> int:
    """The number of a tensor's storage, which its views have too."""
    return x.untyped_storage()._cdata


def _is_view(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    return not name.endswith("_") and storage_of(written[0]) in map(storage_of, read)


def _traffic(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    """Bytes that an operation moves. An expanded tensor counts once; a gather reads what it writes."""
    if name in GATHERS:
        return 2 * sum(map(_nbytes, written))
    if name == "index_copy_":
        return 2 * _nbytes(read[2])
    return sum(map(_nbytes, read)) + (0 if name.endswith("_") else sum(map(_nbytes, written)))


def _nbytes(x: Tensor) -> int:
    return min(x.untyped_storage().nbytes(), x.numel() * x.element_size())
