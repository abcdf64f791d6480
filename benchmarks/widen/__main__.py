"""Widens a small model and its heads to a large shape: `python -m benchmarks.widen MODEL --shape 8b --out FOLDER`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, get_args

import typer

from benchmarks.widen.heads import widen
from benchmarks.widen.target import SHAPES
from eyas.config import Dtype
from eyas.errors import ConfigError, EyasError
from eyas.progress import progress


def main(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a small target: Llama, Mistral, Qwen 2, 2.5 or 3.")],
    out: Annotated[Path, typer.Option(help="Folder of the widened models; the target goes to its subfolder target.")],
    shape: Annotated[str, typer.Option(help="The size to give it: 70b, 8b, 1b, 400m or 60m.")] = "8b",
    draft_model: Annotated[list[str], typer.Option(help="Folder of a draft head or small model; may be repeated.")] = [],  # noqa: B006
    keep_vocabulary: Annotated[bool, typer.Option("--keep-vocabulary", help="Keep the vocabularies as they are.")] = False,
    dtype: Annotated[str, typer.Option(help="Type of the written weights; auto takes the model's.")] = "auto",
) -> None:
    """Embed a small model and its heads in a large shape, where they compute the same function at the large one's cost."""
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    if dtype not in get_args(Dtype):
        raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(get_args(Dtype))}")
    chosen = replace(SHAPES[shape], vocab_size=0) if keep_vocabulary else SHAPES[shape]
    with progress() as shown:
        folders = widen(model, draft_model, chosen, out, dtype, shown)
    print("\n".join(map(str, folders)))


if __name__ == "__main__":
    try:
        typer.run(main)
    except (EyasError, OSError) as error:
        sys.exit(f"error: {error}")
