"""The `eyas` command. The module behind a subcommand is imported when that subcommand runs, so that help is quick."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from eyas import __version__
from eyas.errors import EyasError, MissingPackage


@dataclass(frozen=True)
class Subcommand:
    """Definition of a subcommand: `attribute` of `module` is a typer app or a function.

    Attributes:
        summary: its line in the help.
        extra: of the package's extras, the one that brings the packages that it needs.
    """

    module: str
    attribute: str
    summary: str
    extra: str = "serve"


SUBCOMMANDS = {
    "serve": Subcommand(
        "eyas.services.local.serve", "serve", "Serve a model on this machine: every service in one process tree."
    ),
    "serve router": Subcommand("eyas.services.router.__main__", "app", "Run one router from a config file."),
    "serve verifier": Subcommand("eyas.services.verifier.__main__", "app", "Run one verifier from a config file."),
    "serve draft": Subcommand("eyas.services.draft.__main__", "app", "Run one draft service from a config file."),
    "generate": Subcommand("eyas.cli.generate", "generate", "Stream the continuation of a prompt."),
    "chat": Subcommand("eyas.cli.generate", "chat", "Talk to a served or a local model."),
    "run-batch": Subcommand("eyas.services.local.batch", "run_batch", "Run a file of requests in OpenAI's batch format."),
    "keys": Subcommand("eyas.services.router.auth.keys", "keys", "Make API keys for a router."),
    "drafters": Subcommand("eyas.cli.check", "drafters", "List the drafting methods."),
    "check": Subcommand("eyas.cli.check", "check", "Check a model and its draft head before serving them."),
    "bench": Subcommand("eyas.cli.bench", "bench", "Measure speed and acceptance; write a dated report.", "bench"),
    "plan": Subcommand("eyas.cli.bench", "plan", "Estimate when a drafter apart pays: rates and prices from cost tables."),
    "train": Subcommand("eyas.cli.train", "train", "Train a draft head for a model.", "train"),
    "datastore": Subcommand(
        "eyas.drafters.lookup.datastore", "datastore", "Build the datastore of the rest method.", "rest"
    ),
    "env": Subcommand(
        "eyas.cli.environment", "env", "Print versions, processor, GPUs and compiled kernels, for a bug report."
    ),
}


def _children(name: str) -> list[str]:
    """Return the names of the subcommands one word below a subcommand; without a name, of all of one word."""
    return [each for each in SUBCOMMANDS if each.rpartition(" ")[0] == name]


class LazyCommand(TyperCommand):
    """A subcommand that is imported when it runs, or when its words are completed."""

    def __init__(self, name: str) -> None:
        super().__init__(name.rpartition(" ")[2], help=SUBCOMMANDS[name].summary)
        self._path = name

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Begin the command itself, or the one below it that the first word names."""
        path = f"{self._path} {args[0]}" if args else ""
        if path in _children(self._path):
            return load_command(path).make_context(path, args[1:], parent, **extra)
        return load_command(self._path).make_context(info_name, args, parent, **extra)


class LazyGroup(TyperGroup):
    """Group that lists all subcommands by their summaries, and imports only the one that is run."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name in _children(""):
            self.add_command(LazyCommand(name))

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand. An EyasError, or a path that cannot be used, is one line on stderr and exit status 1."""
        try:
            return super().invoke(ctx)
        except (EyasError, OSError) as error:
            if isinstance(error, OSError) and error.filename is None:
                raise
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        except ModuleNotFoundError as error:
            _exit_without(error, ctx.invoked_subcommand)


def _exit_without(error: ModuleNotFoundError, name: str) -> NoReturn:
    """Say which extra brings the package that a subcommand needs, and exit with status 1. Raises a missing part of Eyas."""
    if (error.name or "eyas").partition(".")[0] == "eyas":
        raise error
    print(f"error: {MissingPackage(f'`eyas {name}`', error.name or '', SUBCOMMANDS[name].extra)}", file=sys.stderr)
    raise typer.Exit(1) from error


def load_command(name: str) -> Any:
    """Import a subcommand. Exits with status 1 and a hint if a package of an extra is not installed."""
    subcommand = SUBCOMMANDS[name]
    try:
        found = getattr(import_module(subcommand.module), subcommand.attribute)
    except ModuleNotFoundError as error:
        _exit_without(error, name)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False)
        found.command()(function)
    command: Any = typer.main.get_command(found)
    for child in _children(name) if isinstance(command, TyperGroup) else ():
        command.add_command(LazyCommand(child))
    return command


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"eyas {__version__}")
        raise typer.Exit


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _eyas(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Eyas serves large language models faster by speculative decoding, with exactly the output of plain decoding.

    Begin with `eyas serve --demo` in a checkout, or with `eyas serve MODEL`.
    """


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
