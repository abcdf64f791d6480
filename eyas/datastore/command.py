"""`eyas datastore`: options in, a folder on disk out. Loads numpy and the tokenizer only once it starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from eyas.errors import EyasError

datastore = typer.Typer(no_args_is_help=True)


@datastore.callback()
def _datastore() -> None:
    """Corpora that drafter `rest` looks its guesses up in."""


@datastore.command()
def build(
    corpus: Annotated[list[Path], typer.Argument(help="Text files, .jsonl files with text or token_ids, or folders.")],
    target: Annotated[
        str, typer.Option("--target", "--tokenizer", help="Folder or hub id that holds the target's tokenizer.json.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Tokenize CORPUS and sort its suffixes."""
    try:
        num_tokens = _build(corpus, target, out)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    print(f"{num_tokens} tokens written to {out}")


def _build(corpus: Sequence[Path], target: str, out: Path) -> int:
    from eyas.datastore.building import build_datastore
    from eyas.datastore.corpus import corpus_files, documents, vocabulary_digest
    from eyas.text import load_tokenizer

    tokenizer, files = load_tokenizer(target).tokenizer, corpus_files(corpus)
    with Progress(console=Console(stderr=True)) as progress:

        def read() -> Iterator[list[int]]:
            task = progress.add_task("tokenizing", total=sum(file.stat().st_size for file in files))
            for file in files:
                yield from documents(file, tokenizer)
                progress.advance(task, file.stat().st_size)
            progress.add_task("sorting suffixes", total=None)

        vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        return build_datastore(read(), vocab_size, vocabulary_digest(tokenizer), out)
