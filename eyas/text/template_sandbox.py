"""Jinja's sandbox with limits of time and memory: chat templates come with checkpoints and are not trusted."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
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
# Bits of a product or power of whole numbers.
MAX_BITS = 2**16
# Address space of the process that tries a template, which needs a tenth of it.
TRIAL_MEMORY = 2**30
_TRIAL = "from eyas.text.template_sandbox import trial; trial()"
_USER, _ASSISTANT = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}


class CostlyTemplate(InvalidRequest):
    """A template that takes too much time or memory."""


class _Generator(CodeGenerator):
    """Generator of a template's code, in which loops look at the clock."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802 - jinja2's name
        """Compile a template."""
        for loop in [*node.find_all(nodes.For)]:
            loop.iter = nodes.Filter(loop.iter, "timed_items", [], [], None, None)
        super().visit_Template(node, frame)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which loops and recursion end. Safe for use from any thread.

    Jinja itself bounds `range` only. Here each turn of a loop and each call looks at the clock.
    """

    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self._rendering = threading.local()
        self.filters["timed_items"] = self._timed_items
        self.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja2's own escapes HTML
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = time.strftime

    def rendered(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Return the text of a template of this sandbox. Raises CostlyTemplate, and whatever else a template can raise."""
        self._rendering.until = time.thread_time() + MAX_RENDER_SECONDS
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
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or power, unless it is too large."""
        if isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            most = MAX_BITS
        else:  # a text or list, and how often
            size = math.prod(len(value) if hasattr(value, "__len__") else value for value in (left, right))
            most = MAX_LENGTH
        if size > most:
            raise CostlyTemplate(f"the chat template computes a value of a size above {most}", "messages")
        return super().call_binop(context, operator, left, right)

    def _timed_items(self, items: Iterable[T]) -> Iterator[T]:
        for item in items:
            self._check_time()
            yield item

    def _check_time(self) -> None:
        if time.thread_time() > self._rendering.until:
            raise CostlyTemplate(f"the chat takes more than {MAX_RENDER_SECONDS:g} s to render; shorten it", "messages")


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
