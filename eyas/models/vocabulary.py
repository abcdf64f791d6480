"""Whether two models speak of the same tokens: two checkpoints in, an error out. Reads no weights."""

from __future__ import annotations

from pathlib import Path

from eyas.errors import CheckpointError
from eyas.models.checkpoint import read_target_config, resolve


def check_vocabulary(draft: str, target: str) -> None:
    """Raises CheckpointError unless both vocabularies have the same size and, where both folders hold a tokenizer.json,
    every token the same id."""
    folders = resolve(draft), resolve(target)
    mine, its = (read_target_config(folder).get("vocab_size") for folder in folders)
    if mine != its:
        raise CheckpointError(
            f"the draft model {draft} has a vocabulary of {mine}, the target {target} one of {its}; take a draft model that "
            "was made with the target's vocabulary"
        )
    own, wanted = (_token_ids(folder) for folder in folders)
    differing = sorted(token for token in own.keys() | wanted.keys() if own.get(token) != wanted.get(token))
    if own and wanted and differing:
        token = differing[0]
        first, second = (ids.get(token, "missing") for ids in (own, wanted))
        raise CheckpointError(
            f"the draft model {draft} has another tokenizer than the target {target}: {len(differing)} tokens differ, "
            f"such as {token!r}, which is {first} in the one and {second} in the other"
        )


def _token_ids(folder: Path) -> dict[str, int]:
    """The vocabulary of the folder's tokenizer.json, added tokens included; empty where there is none."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    from tokenizers import Tokenizer

    try:
        return dict(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"cannot read {file}: {error}") from error
