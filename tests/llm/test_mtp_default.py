"""An `LLM` of a target that brings a module along drafts with it, unless a method is named; `eyas check head` checks it."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from eyas import LLM, SamplingParams
from eyas.cli.main import app
from eyas.config.engine import HeadValidation
from eyas.errors import CheckpointError, OutOfMemory
from eyas.models import loading
from eyas.models.fingerprints import target_fingerprint
from eyas.models.heads import mtp, validation
from tests.support.tiers import nightly
from tests.support.tiny import write_spelling_tokenizer
from tests.support.tiny_mtp import DEEPSEEK, write_mtp

PROMPT = {"prompt_token_ids": [5, 6, 7]}
SAMPLING = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less text, which is enough to see what is wrong."""
    monkeypatch.setattr(validation, "SAMPLED_LENGTH", 24)


def written(folder: Path, **settings: bool) -> str:
    path = write_mtp(folder, "glm4_moe", **settings)
    write_spelling_tokenizer(Path(path))
    return path


def output(llm: LLM) -> tuple[list[int], float]:
    with llm:
        (found,) = llm.generate([PROMPT], SAMPLING, use_tqdm=False)
    stats = found.outputs[0].stats
    return list(found.outputs[0].token_ids), stats.num_emitted / max(stats.num_verify_steps, 1)


def drafts_of(llm: LLM) -> tuple[list[int], int]:
    """The tokens of a request, and how many were drafted."""
    with llm:
        (found,) = llm.generate([PROMPT], SAMPLING, use_tqdm=False)
    return list(found.outputs[0].token_ids), found.outputs[0].stats.num_drafted


def test_drafts_come_from_the_module_if_no_method_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "target", agrees=True)
    plain, one = output(LLM(folder, method="none"))
    assert one <= 1
    vllm = {"method": "glm4_moe_mtp", "num_speculative_tokens": 2}
    for config, least in ((None, 3.5), (vllm, 2.5)):
        tokens, length = output(LLM(folder, draft_budget="fixed", speculative_config=config))
        assert tokens == plain
        assert length > least


def test_a_module_at_chance_drafts_only_if_it_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = written(tmp_path / "target")
    tokens, drafted = drafts_of(LLM(folder))
    assert drafted == 0
    assert "decoding without them" in caplog.text
    again, drafted = drafts_of(LLM(folder, method="mtp", draft_budget="fixed"))
    assert again == tokens
    assert drafted > 0
    assert "To decode without drafts, set method to none" in caplog.text
    other = written(tmp_path / "other", modules=False)
    with pytest.raises(CheckpointError, match="hardly ever guesses what this target predicts"):
        LLM(other, folder, "mtp")


def raise_no_memory(*arguments: object) -> None:
    raise torch.OutOfMemoryError("no memory is left")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "how"),
    [
        ("damaged", "auto"), ("wrong wiring", "never"), ("no memory", "auto"),
        nightly("damaged", "never"), nightly("wrong wiring", "auto"), nightly("no memory", "never"),
    ],
)  # fmt: skip
def test_a_default_that_cannot_be_used_stops_no_start(
    problem: str, how: HeadValidation, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "target", agrees=True)
    plain, _ = drafts_of(LLM(folder, method="none"))
    if problem == "damaged":
        tensors = load_file(Path(folder, "model.safetensors"))
        del tensors[DEEPSEEK[1]]
        save_file(tensors, Path(folder, "model.safetensors"))
        reason = DEEPSEEK[1]
    elif problem == "wrong wiring":
        config = json.loads(Path(folder, "config.json").read_text())
        Path(folder, "config.json").write_text(json.dumps({**config, "eyas": {"output": "nothing"}}))
        reason = "eyas"
    else:
        monkeypatch.setattr(mtp, "MtpHead", raise_no_memory)
        reason = "no memory is left"
    assert drafts_of(LLM(folder, validate_head=how)) == (plain, 0)
    assert re.search(f"decoding without drafts, .*{re.escape(reason)}.*set method to none", caplog.text)
    with pytest.raises(OutOfMemory if problem == "no memory" else CheckpointError, match=re.escape(reason)):
        LLM(folder, method="mtp", validate_head=how)


def test_an_llm_of_latents_drafts_by_default(tmp_path: Path) -> None:
    folder = write_mtp(tmp_path / "target", "deepseek_v3", agrees=True)
    write_spelling_tokenizer(Path(folder))
    tokens, drafted = drafts_of(LLM(folder, draft_budget="fixed"))
    assert drafted > 0
    assert tokens == drafts_of(LLM(folder, method="none"))[0]


def test_another_checkpoint_may_bring_the_module(tmp_path: Path) -> None:
    whole, without = written(tmp_path / "whole", agrees=True), written(tmp_path / "without", agrees=True, modules=False)
    tokens, length = output(LLM(without, whole, "mtp", draft_budget="fixed"))
    assert length > 3.5
    assert tokens == output(LLM(without))[0]


def test_check_head_records_what_the_module_feeds_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    folder = written(tmp_path / "target", agrees=True)
    before = target_fingerprint(folder)
    result = CliRunner().invoke(app, ["check", "head", "--model", folder, "--device", "cpu", "--write"])
    assert result.exit_code == 0, result.output
    assert "as its config says: the target's final state, output normed; right on 100.0 %" in result.output
    recorded = json.loads(Path(folder, "config.json").read_text())["eyas"]
    assert (recorded["aux_hidden_state_layers"], recorded["output"]) == ([-1], "normed")
    assert target_fingerprint(folder) == before
    assert output(LLM(folder, draft_budget="fixed"))[1] > 3.5


def test_check_head_without_a_module_reads_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "target", modules=False)
    monkeypatch.setattr(loading, "load_target", raise_no_memory)
    result = CliRunner().invoke(app, ["check", "head", "--model", folder, "--device", "cpu"])
    assert "method 'none' has no head to check" in f"{result.output}{result.exception}"
