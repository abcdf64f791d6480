"""The comparison with other libraries goes on where it was stopped, and its process of Eyas answers as it should."""

from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers.__main__ import CONTENDERS, NAMES, Case, Contender, Measured, Measurements, Settings
from eyas.errors import ConfigError, Unavailable
from tests.support.services.http_router import TOKENIZER

TARGET = "models/demo/target"
SETTINGS = Settings("model.gguf", 1, num_tokens=4, batches=(1, 2), prefill_tokens=32, repeats=2)


def test_measurements_are_kept_but_a_cut_line_is_not(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    kept = Measurements(file, SETTINGS)
    kept.add(Measured(NAMES[0], "decode, batch 1", 0, 2.0, 500.0))
    with file.open("a") as stream:
        stream.write('{"contender": "Eyas, float32", "ca')  # where the run was stopped
    again = Measurements(file, SETTINGS)
    assert again.has(CONTENDERS[0], "decode, batch 1", 0)
    assert not again.has(CONTENDERS[0], "decode, batch 1", 1)
    again.add(Measured(NAMES[0], "decode, batch 1", 1, 3.0, 400.0))
    assert [each.value for each in Measurements(file, SETTINGS).found] == [2.0, 3.0]


def test_other_settings_do_not_mix_with_what_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    Measurements(file, SETTINGS)
    with pytest.raises(ConfigError, match="other settings"):
        Measurements(file, Settings("model.gguf", 2, 4, (1, 2), 32, 2))


def test_prompts_are_of_equal_length_and_lookups_repeat() -> None:
    for case in SETTINGS.cases:
        prompts = peers.prompts_of(case, TOKENIZER)
        assert [len(prompt) for prompt in prompts] == [case.num_prompt] * case.batch
    (repeated,) = prompts
    half = repeated[1 : 1 + (case.num_prompt - 1) // 2]
    assert repeated[1 + len(half) : 1 + 2 * len(half)] == half


@pytest.mark.nightly
def test_a_process_decodes_and_says_why_it_ended(tmp_path: Path) -> None:
    contender = Contender("Eyas", "int8", "eyas", "folder", own=False)
    with peers.running(contender, SETTINGS, {"folder": TARGET}, tmp_path, lookup=True) as process:
        measured = process.measure(Case("decode", 2, 32, 4), 0, [[*range(300, 332)], [*range(400, 432)]])
        assert measured.value > 0
        assert process.memory_mib > 100
        with pytest.raises(Unavailable, match="Eyas, int8 has ended"):
            process.decode([[10**9]], 1)
