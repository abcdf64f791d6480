"""Kernels of Triton where there is no GPU: they run in its interpreter, and not at all while a graph is captured."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from torch import Tensor

from tests.support.devices.launches import Launch, recorded

Out = TypeVar("Out")
# Arguments that the kernels of attention write.
WRITTEN = ("partials", "sums", "out")


def clear_results(launch: Launch) -> None:
    """Numbers where a kernel would have left some."""
    for name in WRITTEN:
        if isinstance(memory := launch.arguments.get(name), Tensor):
            memory.zero_()


def run_again(run: Callable[[], Out], note: Callable[[Launch], None] = clear_results) -> Callable[[], Out]:
    """A stand-in for a captured graph: runs the same closure again on its static inputs.

    As on CUDA, its kernels do not run during the capture: `note` takes their launches.
    """
    with recorded(note):
        run()
    return run


def fixed_products(patch: pytest.MonkeyPatch) -> None:
    """Let `tl.dot` sum in one order for all rows of a tile, as a GPU does.

    On some processors NumPy's library sums the last rows of a tile in another order than the first ones.
    """
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, acc: Any, *_: Any) -> Any:
        products = a.data[..., None] * b.data[..., None, :, :]
        return interpreter.TensorHandle(products.sum(-2, dtype=acc.data.dtype) + acc.data, acc.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


# Functions of the language, beside operators, whose way depends on the types of their operands and on numbers alone.
PLANNED = {
    "where", "load", "store", "cast", "to", "expand_dims", "maximum", "minimum", "exp", "exp2", "log", "log2", "ceil", "abs",
    "sqrt", "rsqrt",
}  # fmt: skip


def quicken() -> None:
    """Let Triton's interpreter do once what it does at each call and what changes nothing.

    It patches `triton.language` once, copies nothing from the CPU to the CPU, and plans once what an operation does with
    operands of some types. Its types take most of its time. It looks for no overflows: compiled kernels do not either.
    """
    from triton.language import core
    from triton.runtime import interpreter

    patched, patch, np_dtype = set[int](), interpreter._patch_lang, interpreter._get_np_dtype
    executor, semantic = interpreter.GridExecutor, interpreter.interpreter_semantic
    np_dtypes, unwrap_constexpr = dict[str, Any](), core._unwrap_if_constexpr
    unwrapped = {semantic.tensor, int, float, bool, str, type(None)}

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            """No kernel is compiled in this process."""

    def patch_once(fn: Callable[..., object]) -> Scope:
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            patch(fn)
        return Scope()

    def patch_member(owner: Any, name: str, member: Any, builder: Any, scope: Scope) -> None:
        """A function of the language as kernels call it: with the interpreter's semantic."""
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        is_planned = name.startswith("__") or name in PLANNED
        setattr(owner, name, _Plans(call, semantic).function() if is_planned else call)

    def np_dtype_of(dtype: Any) -> Any:
        if (known := np_dtypes.get(dtype.name)) is None:
            known = np_dtypes[dtype.name] = np_dtype(dtype)
        return known

    def unwrap(value: Any) -> Any:
        return value if type(value) in unwrapped else unwrap_constexpr(value)

    interpreter._LangPatchScope, interpreter._patch_lang, interpreter._patch_attr = Scope, patch_once, patch_member
    interpreter._get_np_dtype, core._unwrap_if_constexpr = np_dtype_of, unwrap
    interpreter.TensorHandle.__post_init__ = lambda self: None
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    executor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    executor._restore_args_dev = lambda *_: None
    semantic.tensor.__init__ = _sharing_shapes(semantic.tensor.__init__)


def _sharing_shapes(plain: Callable[..., None]) -> Callable[..., None]:
    """The constructor of Triton's tensors, which makes the objects that describe a shape once for each type."""

    def init(self: Any, handle: Any, kind: Any) -> None:
        known = kind.__dict__.get("parts_of_tensors")
        if known is None:
            plain(self, handle, kind)
            known = kind.parts_of_tensors = {name: value for name, value in self.__dict__.items() if name != "handle"}
        self.__dict__.update(known)
        self.handle = handle

    return init


def _kind_of(value: Any) -> tuple[type, Any]:
    """What a value of another type than a tensor is known by. Slices cannot be looked up, NaN never, and 0.0 is -0.0."""
    return type(value), repr(value) if isinstance(value, tuple | slice | float) else value


class _Plans:
    """What a function of the language does for each kind of operands: the functions of the interpreter's builder it calls.

    A plan is made when operands of a kind are met for the second time.
    """

    is_recording = False

    def __init__(self, plain: Callable[..., Any], semantic: Any) -> None:
        self.plain, self.semantic, self.tensor = plain, semantic, semantic.tensor

    def function(self) -> Callable[..., Any]:
        """The same function, with plans."""
        from triton.language import constexpr

        plans, tensor, plain = dict[Any, Callable[..., Any] | None](), self.tensor, self.plain

        def call(*args: Any, **named: Any) -> Any:
            if _Plans.is_recording:
                return plain(*args, **named)
            named.pop("_semantic", None)
            args = tuple([arg.value if type(arg) is constexpr else arg for arg in (*args, *named.values())])
            kinds = (*[arg.type.name if type(arg) is tensor else _kind_of(arg) for arg in args], *named)
            if plan := plans.get(kinds):
                return plan(*args)
            if kinds in plans:
                plans[kinds] = plan = self.plan(args, tuple(named))
                return plan(*args)
            plans[kinds] = None
            num_placed = len(args) - len(named)
            return plain(*args[:num_placed], **dict(zip(named, args[num_placed:], strict=True)))

        return call

    def plan(self, args: Sequence[Any], names: Sequence[str]) -> Callable[..., Any]:
        """A function that calls what `plain` calls of the builder with operands of these kinds; the last ones have names."""
        builder, steps = self.semantic.builder, list[tuple[Any, Sequence[Any], Any]]()
        num_placed = len(args) - len(names)

        class Recorder:
            def __getattr__(self, name: str) -> Any:
                found = getattr(builder, name)
                if not callable(found):
                    return found

                def call(*given: Any) -> Any:
                    steps.append((found, given, found(*given)))
                    return steps[-1][2]

                return call

        copies = [self.tensor(arg.handle.clone(), arg.type) if type(arg) is self.tensor else arg for arg in args]
        _Plans.is_recording, self.semantic.builder = True, Recorder()
        try:
            out = self.plain(*copies[:num_placed], **dict(zip(names, copies[num_placed:], strict=True)))
        finally:
            _Plans.is_recording, self.semantic.builder = False, builder
        handles = {id(copy.handle): f"a{n}.handle" for n, copy in enumerate(copies) if type(copy) is self.tensor}
        known, lines = dict[str, Any](tensor=self.tensor), list[str]()

        def name_of(value: Any) -> str:
            """How the function calls a value: an operand, the result of a step, or what is the same for all operands."""
            if id(value) not in handles:
                known[f"c{len(known)}"] = value
                return f"c{len(known) - 1}"
            return handles[id(value)]

        for number, (function, given, found) in enumerate(steps):
            if any(id(value) in handles for value in given):
                lines.append(f"h{number} = {name_of(function)}({', '.join(map(name_of, given))})")
                handles |= {id(found): f"h{number}"} if found is not None else {}
        if isinstance(out, self.tensor):
            lines.append(f"return tensor({name_of(out.handle)}, {name_of(out.type)})")
        exec("\n ".join([f"def plan({', '.join(f'a{n}' for n in range(len(args)))}):", *lines, "pass"]), known)
        return known["plan"]
