"""Jinja's sandbox with limits of time and memory: chat templates come with checkpoints and are not trusted."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NoReturn, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eyas.errors import ConfigError, InvalidRequest

T = TypeVar("T")

# Processor time of one rendering, and characters of its text. A body of 16 MiB, shown whole, is far below both.
MAX_RENDER_SECONDS = 5.0
MAX_LENGTH = 2**26
# Characters and items of all texts and lists that one rendering makes of others, whether or not it keeps them.
MAX_MADE = 2**29
# Bits of a product or power of whole numbers.
MAX_BITS = 2**16
# Widths and counts that filters and methods of texts take.
MAX_NUMBER = 1024
# A width of MAX_NUMBER and more in a format, or one that is a value.
_WIDE_PERCENT, _WIDE_BRACES = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)"), re.compile(r"\{[^{}]*:[^{}]*(\d{4}|\{)")
# Address space of the process that tries a template, which needs a tenth of it.
TRIAL_MEMORY = 2**30
_TRIAL = "from eyas.text.template_sandbox import trial; trial()"
_USER, _ASSISTANT = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}


class CostlyTemplate(InvalidRequest):
    """A template that takes too much time or memory."""


class _Generator(CodeGenerator):
    """Generator of a template's code, in which loops look at the clock, and `~` at the length."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802 - jinja2's name
        """Compile a template."""
        for loop in [*node.find_all(nodes.For)]:
            loop.iter = nodes.Filter(loop.iter, "timed_items", [], [], None, None)
        for joined in [*node.find_all(nodes.Concat)]:
            texts = nodes.Tuple(joined.nodes, "load")
            joined.nodes = [nodes.Filter(texts, "joined", [], [], None, None)]
        super().visit_Template(node, frame)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which loops and recursion end, and values stay small. Safe for use from any thread.

    Jinja itself bounds `range` only. Here each turn of a loop and each call looks at the clock. What makes one text of
    others looks at its length first: a text that doubles with each message would take all memory in a moment.
    """

    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols], finalize=self._measured
        )
        self._rendering = threading.local()
        self.filters["timed_items"] = self._timed_items
        self.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja2's own escapes HTML
        self.filters["joined"] = lambda texts: self.concat(str(self._measured(text)) for text in texts)
        for name in ("pprint", "string", "tojson"):
            self.filters[name] = self._measuring(self.filters[name])
        for name in ("batch", "center", "format", "indent", "join", "replace", "slice", "tojson", "wordwrap"):
            self.filters[name] = self._bounded_filter(name, self.filters[name])
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = time.strftime

    def rendered(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Return the text of a template of this sandbox. Raises CostlyTemplate, and whatever else a template can raise."""
        self._rendering.until = time.thread_time() + MAX_RENDER_SECONDS
        self._rendering.num_left = MAX_MADE
        pieces, length = list[str](), 0
        for piece in self._timed_items(template.generate(variables)):
            length += len(piece)
            if length > MAX_LENGTH:
                raise CostlyTemplate(f"the chat is rendered to more than {MAX_LENGTH} characters; shorten it", "messages")
            pieces.append(piece)
        return "".join(pieces)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - jinja2's names
        """Call what a template calls, unless the time is over."""
        __self._check_time()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        if isinstance(owner := getattr(method, "__self__", None), str):
            __self._check_call(method.__name__, owner, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or power, unless it is too large."""
        if operator in "+%":
            if isinstance(left, str) and operator == "%":
                self._check_call("%", left, right if isinstance(right, tuple) else [right])
            if hasattr(left, "__len__") and hasattr(right, "__len__") and operator == "+":
                self._make(len(left) + len(right))
            return super().call_binop(context, operator, left, right)
        if isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            most = MAX_BITS
        else:  # a text or list, and how often
            size = math.prod(len(value) if hasattr(value, "__len__") else value for value in (left, right))
            most = MAX_LENGTH
        _check_size(size, most)
        self._make(size)
        return super().call_binop(context, operator, left, right)

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the texts of a macro, a block or `~`. Raises CostlyTemplate for too many characters."""
        known = [*pieces]
        self._make(sum(map(len, known)))
        return "".join(known)

    def _make(self, size: int) -> None:
        """Count a new text or list. Raises CostlyTemplate if it is too large, or all of them are."""
        _check_size(size)
        self._rendering.num_left -= size
        if self._rendering.num_left < 0:
            raise CostlyTemplate(f"the chat template makes more than {MAX_MADE} characters of others", "messages")

    def _measured(self, value: T) -> T:
        """Return a value whose text is not too long. Raises CostlyTemplate for one that is, before the text is made."""
        size = 0
        waiting: list[Any] = [value] if isinstance(value, list | tuple | Mapping) else []
        while waiting:
            self._check_time()
            part = waiting.pop()
            size += len(part) if isinstance(part, str) else 1
            _check_size(size)
            if isinstance(part, Mapping):
                waiting += [*part.keys(), *part.values()]
            elif isinstance(part, list | tuple):
                waiting += part
        return value

    def _measuring(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that writes a value, and looks at its size first."""
        return lambda value, *args, **kwargs: plain(self._measured(value), *args, **kwargs)

    def _check_call(self, name: str, text: Any, arguments: Sequence[Any]) -> None:
        """Raises CostlyTemplate if a method or filter of this name would make too much of a text, see `_check_growth`."""
        if name in ("format", "%", "format_map"):
            for argument in arguments:
                _check_size(len(argument) * text.count("%" if "%" in text else "{") if isinstance(argument, str) else 0)
                self._measured(argument)
        elif name == "join":
            self._measured(text if isinstance(text, list | tuple) else [*arguments])
        _check_growth(name, text, arguments)

    def _bounded_filter(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter of jinja2 that looks at the size of its result first. Its first argument may be jinja2's own."""
        num_own = 1 if hasattr(plain, "jinja_pass_arg") else 0

        @wraps(plain)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            own, value, rest = args[:num_own], args[num_own], args[num_own + 1 :]
            value = [*value] if name == "join" and not isinstance(value, str | list | tuple) else value
            self._check_call(name, value, [*rest, *kwargs.values()])
            return plain(*own, value, *rest, **kwargs)

        return bounded

    def _timed_items(self, items: Iterable[T]) -> Iterator[T]:
        for item in items:
            self._check_time()
            yield item

    def _check_time(self) -> None:
        if time.thread_time() > self._rendering.until:
            raise CostlyTemplate(f"the chat takes more than {MAX_RENDER_SECONDS:g} s to render; shorten it", "messages")


def _check_size(size: int, most: int = MAX_LENGTH) -> None:
    """Raises CostlyTemplate for a value that is too large."""
    if size > most:
        raise CostlyTemplate(f"the chat template computes a value of a size above {most}", "messages")


def _check_growth(name: str, text: Any, arguments: Sequence[Any]) -> None:
    """Raise CostlyTemplate if a method or filter of this name would make too much of a text. Wrong arguments fail later.

    Args:
        name: of the method or filter; "%" formats too.
        text: what it is called on; a list of texts for the filter `join`.
        arguments: all of them, in order.
    """
    for number in arguments:
        if isinstance(number, int) and name != "replace":  # there it is how many at most
            _check_size(number, MAX_NUMBER)
    match name, text, arguments:
        case "replace", str(), [str() as old, str() as new, *_]:
            _check_size(len(text) + text.count(old) * len(new))
        case "join", str(), [parts, *_] if isinstance(parts, list | tuple):
            _check_size(sum(len(part) + len(text) for part in parts if isinstance(part, str)))
        case "join", [*parts], [*separator]:
            added = len(separator[0]) if separator and isinstance(separator[0], str) else 0
            _check_size(sum(len(str(part)) + added for part in parts))
        case "indent" | "expandtabs" as kind, str(), _:
            widths = [number if isinstance(number, int) else len(number) for number in arguments[:1]] or [8]
            _check_size(len(text) + text.count("\n" if kind == "indent" else "\t") * widths[0])
        case "format" | "%", str(), _:
            _check_size(MAX_NUMBER if _WIDE_PERCENT.search(text) or _WIDE_BRACES.search(text) else 0, MAX_NUMBER - 1)


def try_templates(sources: Sequence[str], variables: Mapping[str, Any], name: str) -> None:
    """Render a short chat with new templates in a child process, which may die of them.

    So a template that takes all memory, or computes in one call without end, does not end the process that loads it.

    Raises:
        ConfigError: the child died.
    """
    command = [sys.executable, "-P", "-c", _TRIAL]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    code = subprocess.run(
        command, input=json.dumps([sources, variables]).encode(), capture_output=True, env=environment, check=False
    ).returncode
    if code:
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        reason = f"the chat template of {name} takes too much time or memory for a short chat ({cause})"
        raise ConfigError(f"{reason}; set another chat_template")


def trial() -> None:
    """Render the templates that stdin holds, within limits of time and memory. What else is wrong shows later."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind, most in ((resource.RLIMIT_AS, TRIAL_MEMORY), (resource.RLIMIT_CPU, 2 * math.ceil(MAX_RENDER_SECONDS))):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard < 0 else min(most, hard), hard))
    sources, variables = json.load(sys.stdin)
    sandbox = BoundedSandbox()
    variables |= {"messages": [_USER, _ASSISTANT, _USER], "tools": None, "documents": None, "add_generation_prompt": True}
    for source in sources:
        try:
            sandbox.rendered(sandbox.from_string(source), variables)
        except MemoryError:
            sys.exit(errno.ENOMEM)
        except Exception:  # the chat does not fit, or the template does not compile
            continue


class _GenerationBlock(Extension):
    """Extension that renders the body of {% generation %} unchanged; the tag marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the statements up to {% endgeneration %}."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
