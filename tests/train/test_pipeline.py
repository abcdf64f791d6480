"""The commands around a run: answers and stored states continue after a stop, and figures agree with serving."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from typer.testing import CliRunner

from eyas import LLM, SamplingParams
from eyas.cli.main import app
from eyas.config import TreeConfig
from eyas.errors import ConfigError
from eyas.models.hidden_states import FINAL_NORM_OUTPUT
from eyas.train.config import EvalConfig
from eyas.train.data import DocumentReader, prepare, read_prepared
from eyas.train.evaluate import Evaluator, heldout_prompts
from eyas.train.export import write_card
from eyas.train.features import StoredFeatures, store_features
from eyas.train.methods import build_online_target, build_source, build_trainer
from eyas.train.regenerate import Regenerated, RegenerateSettings, regenerate
from eyas.train.trainer import Progressed
from eyas.train.windows import Windows
from tests.support.tiny import DEMO, fixed_config
from tests.support.tiny_block import tiny_block_head
from tests.train.small_runs import settings, small_disk

SETTINGS = RegenerateSettings("tiny", max_tokens=6, prompt_tokens=5, batch=3, prompts_per_document=2)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder / "target"), dtype="float32", device="cpu")


def answer(llm: LLM, folder: Path, out: Path, settings: RegenerateSettings = SETTINGS) -> Regenerated:
    odd = folder / "odd.jsonl"
    odd.write_text('{"text": "{\\"ab\\": 12}"}\n{"messages": [{"role": "system", "content": "a"}]}\n')
    return regenerate(llm, [folder / "ids.jsonl", odd], out, settings)


def test_answers_continue_after_any_cut_without_change(llm: LLM, folder: Path, tmp_path: Path) -> None:
    """A crash leaves a beginning of the file, which may end inside a line."""
    out = tmp_path / "answers.jsonl"
    found = answer(llm, folder, out)
    assert (found.num_entries, found.num_failed, found.num_skipped) == (27, 0, 1)
    whole = out.read_bytes()
    assert [json.loads(line)["index"] for line in whole.splitlines()] == list(range(27))
    for size in (0, 1, len(whole) // 2 + 1, len(whole) - 1, len(whole)):
        out.write_bytes(whole[:size])
        assert answer(llm, folder, out) == found
        assert out.read_bytes() == whole


def test_a_line_torn_inside_a_character_is_answered_again(llm: LLM, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    answer(llm, folder, out)
    whole = out.read_bytes()
    separated = json.dumps({"index": 0, "note": "a\u2028b"}, ensure_ascii=False).encode() + b"\n"
    rest = whole.split(b"\n", 1)[1]
    out.write_bytes(separated + rest + '{"index": 30, "text": "é'.encode()[:-1])
    assert answer(llm, folder, out).num_entries == 27
    assert out.read_bytes() == separated + rest


def test_other_settings_do_not_continue_answers(llm: LLM, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    answer(llm, folder, out)
    with pytest.raises(ConfigError, match="begun with other files"):
        regenerate(llm, [folder / "ids.jsonl"], out, SETTINGS)
    with pytest.raises(ConfigError, match="begun with other chat_template_kwargs"):
        answer(llm, folder, out, replace(SETTINGS, chat_template_kwargs={"enable_thinking": False}))


def test_answers_continue_for_the_same_contents_alone(llm: LLM, tmp_path: Path) -> None:
    """Whatever the file is called."""
    file, renamed, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "answers.jsonl"
    file.write_text('{"token_ids": [3, 4]}\n{"token_ids": [5, 6]}\n')
    regenerate(llm, [file], out, replace(SETTINGS, max_entries=1))
    file.rename(renamed)
    regenerate(llm, [renamed], out, replace(SETTINGS, max_entries=1))
    renamed.write_text('{"token_ids": [3, 4]}\n{"token_ids": [5, 7]}\n')
    with pytest.raises(ConfigError, match="begun with other files"):
        regenerate(llm, [renamed], out, replace(SETTINGS, max_entries=1))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"), ({"prompts_per_document": 0}, "prompts_per_document is 0"),
        ({"temperatures": ()}, "temperatures is empty"), ({"temperatures": (0.0, -1.0)}, "temperature is -1.0"),
        ({"max_entries": -1}, "max_entries is -1"),
    ],
)  # fmt: skip
def test_settings_without_answers_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SETTINGS, **setting)


def test_a_full_disk_keeps_the_answers_written_so_far(
    llm: LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "answers.jsonl", Path.open

    def full(path: Path, mode: str = "r", **arguments: object) -> object:
        if mode == "a" and path.exists():
            raise OSError(28, "No space left on device")
        return real(path, mode, **arguments)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ConfigError, match="free space and run the same command again"):
        answer(llm, folder, out)
    monkeypatch.undo()
    assert len(out.read_bytes().splitlines()) == SETTINGS.batch
    assert answer(llm, folder, out).num_entries == 27


def test_bad_and_empty_entries_cost_no_one_else_the_batch(
    llm: LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight entries one is empty and one too long; the other six are answered in three passes, not one by one."""
    file, sizes, real = tmp_path / "ids.jsonl", [], llm.generate
    long = list(range(2, 12)) * 1000
    entries = [[3, 4, 5 + number] for number in range(6)]
    file.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in [*entries[:3], [], *entries[3:], long]))

    def counted(prompts: list[Any], *arguments: Any, **named: Any) -> Any:
        answers = real(prompts, *arguments, **named)
        sizes.append(len(prompts))
        return answers

    monkeypatch.setattr(llm, "generate", counted)
    settings = RegenerateSettings("tiny", max_tokens=2, prompt_tokens=20_000, batch=8)
    found = regenerate(llm, [file], tmp_path / "out.jsonl", settings)
    assert (found.num_answered, found.num_failed, found.num_skipped) == (6, 1, 1)
    assert sizes == [3, 2, 1]


def test_answers_are_prepared_without_those_that_failed(llm: LLM, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    answer(llm, folder, out)
    with out.open("a") as lines:
        lines.write('{"index": 27, "error": "too long"}\n')
    info = prepare(str(folder / "target"), [out], tmp_path / "data", 0.0, 64, 1, 0)
    assert (info.num_documents, info.num_skipped) == (26, 2)
    assert info.num_supervised <= 26 * SETTINGS.max_tokens, "prompts are not supervised"


def test_a_chats_turns_are_answered_one_after_another(tmp_path: Path) -> None:
    users = [{"role": "user", "content": "def one():"}, {"role": "user", "content": "def two():"}]
    replaced = {"role": "assistant", "content": "old"}
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [users[0], replaced, users[1], replaced]}) + "\n")
    llm = LLM(str(DEMO / "target"), dtype="float32", device="cpu")
    regenerate(llm, [file], tmp_path / "out.jsonl", RegenerateSettings("demo", max_tokens=8, temperatures=(0.0,)))
    messages = json.loads((tmp_path / "out.jsonl").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    for end in (1, 3):
        (output,) = llm.chat([messages[:end]], SamplingParams(8, 0.0), use_tqdm=False)
        assert messages[end]["content"] == output.outputs[0].text
    (((document,), _),) = DocumentReader(str(DEMO / "target"), 4096).read([tmp_path / "out.jsonl"])
    assert any(document.loss_mask)


@pytest.fixture
def forget_precision() -> Iterator[Callable[[], None]]:
    """Forgets the precision that accelerate keeps for a process, now, when called and after the test."""
    forget: Callable[[], None] = AcceleratorState._reset_state
    forget()
    yield forget
    forget()


@pytest.mark.usefixtures("forget_precision")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stored_features_train_as_the_target_does(precision: str, folder: Path, tmp_path: Path) -> None:
    """States of a bfloat16 target are stored exactly, those of a float32 target to 8 bits."""
    changes = {"optimizer__precision": precision, "optimizer__batch_size": 1}
    online = build_trainer(settings(folder, str(folder / "target"), out=str(tmp_path / "a"), **changes))
    config = tmp_path / "run.json"
    config.write_text(json.dumps(asdict(online.config)))
    out = tmp_path / "features"
    for _ in range(2):  # the second finds all shards
        done = CliRunner().invoke(app, ["train", "features", "--out", str(out), "--config", str(config)])
        assert done.exit_code == 0, done.output
    changes |= {"data__features": str(out)}
    stored = build_trainer(settings(folder, str(folder / "target"), out=str(tmp_path / "b"), **changes))
    assert isinstance(stored.source, StoredFeatures)
    for _ in range(3):
        expected, found = float(online.step()["loss"]), float(stored.step()["loss"])
        assert found == (expected if precision == "bf16" else pytest.approx(expected, rel=5e-3))


@pytest.mark.parametrize("method", ["eagle1", "eagle3.1", "peagle", "hydra", "draft_model"])
def test_each_kind_of_head_learns_from_stored_features(method: str, folder: Path, tmp_path: Path) -> None:
    """As from the target in the same process, but for the 8 bits of what is stored."""
    target, out = str(folder / "target"), tmp_path / "features"
    online = build_trainer(settings(folder, target, method, out=str(tmp_path / "a")))
    layers = online.trainee.aux_hidden_state_layers
    assert isinstance(layers, tuple)
    store_features(online.source, online.windows, layers, 32, out, list)
    stored = build_trainer(settings(folder, target, method, out=str(tmp_path / "b"), data__features=str(out)))
    assert isinstance(stored.source, StoredFeatures)
    assert float(stored.step()["loss"]) == pytest.approx(float(online.step()["loss"]), rel=5e-3)


@pytest.mark.parametrize("method", ["dspark", "eagle3", "peagle"])
def test_bfloat16_passes_have_the_float32_loss(
    method: str, folder: Path, tmp_path: Path, forget_precision: Callable[[], None]
) -> None:
    found = {}
    for precision in ("fp32", "bf16"):
        forget_precision()
        config = settings(folder, str(folder / "target"), method, out=str(tmp_path), optimizer__precision=precision)
        found[precision] = float(build_trainer(config).step()["loss"])
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.02)


@pytest.mark.nightly
@pytest.mark.usefixtures("forget_precision")
def test_the_demos_script_trains_a_head(tmp_path: Path) -> None:
    """Its rehearsal for one head and a short text. Its commands run here, because each process imports torch."""
    recorder, text, work = tmp_path / "eyas", tmp_path / "text", tmp_path / "work"
    recorder.write_text(f"#!/bin/sh\nprintf '%s\\037' \"$@\" >> '{tmp_path}/commands'; echo >> '{tmp_path}/commands'\n")
    recorder.chmod(0o755)
    text.mkdir()
    (text / "text.py").write_text("".join(f"def add{number}(a, b):\n    return a + b\n\n\n" for number in range(30)))
    given = {"ENTRIES": "2", "STEPS": "2", "WORK": f"{work}", "TEXT": f"{text}", "EYAS": f"{recorder}"}
    subprocess.run(["sh", "examples/demo_model/train.sh", "medusa"], env=os.environ | given, check=True)
    commands = [line.split("\037")[:-1] for line in (tmp_path / "commands").read_text().splitlines()]
    assert [command[:2] for command in commands] == [["train", name] for name in ("regenerate", "prepare", "run")]
    commands[1] += ["--max-length", "64"]
    commands[-1] += ["--set", "optimizer.batch_size=1", "--set", "data.max_length=64"]  # whole batches take half a minute
    for command in commands:
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    assert re.search("step [12], tau", done.output)
    assert {path.name for path in (work / "medusa" / "best").iterdir()} >= {"config.json", "model.safetensors", "README.md"}


def test_features_of_another_run_are_not_used(folder: Path, tmp_path: Path) -> None:
    target, out = str(folder / "target"), tmp_path / "features"
    config = settings(folder, target)
    windows, layers = Windows(folder / "data", 32), (1, 3)

    def stopped(missing: list[int]) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store_features(build_online_target(config, layers), windows, layers, 32, out, stopped)
    stored = settings(folder, target, data__features=str(out))
    with pytest.raises(ConfigError, match="does not hold all features"):
        build_source(stored, windows, layers)
    with pytest.raises(ConfigError, match=r"aux_hidden_state_layers \[1, 3\], not \[1, 4\]"):
        store_features(build_online_target(config, (1, 4)), windows, (1, 4), 32, out, list)
    store_features(build_online_target(config, layers), windows, layers, 32, out, list)
    build_source(stored, windows, layers)
    with pytest.raises(ConfigError, match="max_length 32, not 64"):
        build_source(stored, Windows(folder / "data", 64), layers)


def test_a_full_disk_stores_no_half_features(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that is small from the start nor one that fills up inside a shard; the same call continues later."""
    config, windows = settings(folder, str(folder / "target")), Windows(folder / "data", 32)
    source, out = build_online_target(config, (1,)), tmp_path / "features"
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
        with pytest.raises(ConfigError, match="GiB free"):
            store_features(source, windows, (1,), 32, out, list)
    assert not list(out.iterdir())
    with small_disk(4096), pytest.raises(ConfigError, match="nothing that was saved is lost"):
        store_features(source, windows, (1,), 32, out, list)
    assert [path.name for path in out.iterdir()] == ["features.json"]
    with pytest.raises(ConfigError, match="does not hold all features"):
        StoredFeatures.open(out, windows, (1,), torch.float32)
    store_features(source, windows, (1,), 32, out, list)
    found = StoredFeatures.open(out, windows, (1,), torch.float32).states(windows.batch([0]))
    assert torch.equal(found.aux, source.states(windows.batch([0])).aux.bfloat16().float())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_evaluation_finds_the_tau_of_serving(temperature: float, folder: Path) -> None:
    target = str(folder / "target")
    head = tiny_block_head("dspark", target)
    c = EvalConfig(num_prompts=2, prompt_tokens=6, max_tokens=24, temperatures=(temperature,), num_draft_tokens=8)
    prompts = heldout_prompts(folder / "data", c)
    found = Evaluator(target, "dspark", prompts, c, "cpu").measure(Path(head))
    tree = TreeConfig(8, 4, c.top_k)
    llm = LLM(target, head, "dspark", "float32", "cpu", tree, fixed_config(), validate_head="never")
    sampling = [SamplingParams(c.max_tokens, temperature, ignore_eos=True, seed=index) for index in range(len(prompts))]
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling, use_tqdm=False)
    stats = [output.outputs[0].stats for output in outputs]
    emitted, steps = (sum(getattr(own, name) for own in stats) for name in ("num_emitted", "num_verify_steps"))
    assert found.tau[temperature] == pytest.approx(emitted / steps)
    assert found.mean_tau == fmean(found.tau.values())


@pytest.mark.parametrize(("share", "words"), [(1.0, "of 6 tokens)"), (0.25, "of 6 tokens, 25.0 % of these written)")])
def test_a_card_says_how_much_the_target_wrote(share: float, words: str, folder: Path, tmp_path: Path) -> None:
    config = settings(folder, str(folder / "target"), out=str(tmp_path))
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 4, "tau_t0": 2.0, "written_share": share}) + "\n")
    card = write_card(config, read_prepared(folder / "data"), Progressed(step=4, best_step=4), 100)
    assert words in card.read_text()


def test_a_run_that_continues_measures_along_the_same_text(folder: Path) -> None:
    """Outputs that the first evaluation cut are cut there again, however long the second may take."""
    target = str(folder / "target")
    head = Path(tiny_block_head("dspark", target))
    c = EvalConfig(num_prompts=2, prompt_tokens=6, max_tokens=24, temperatures=(0.0,), num_draft_tokens=8)
    prompts = heldout_prompts(folder / "data", c)
    first, second = (Evaluator(target, "dspark", prompts, c, "cpu") for _ in range(2))
    found = first.measure(head, limit_s=0)
    assert first.written_share < 0.5
    second.written.update(first.written)
    assert second.measure(head) == found
    assert second.written_share == first.written_share


def test_heads_read_some_of_the_stored_layers(folder: Path, tmp_path: Path) -> None:
    """In their own order, and the final states, which are there for every head."""
    windows = Windows(folder / "data", 32)
    out = tmp_path / "features"
    source = build_online_target(settings(folder, str(folder / "target")), (1, 3))
    store_features(source, windows, (1, 3), 32, out, list)
    batch = windows.batch([0, 1])
    stored = StoredFeatures.open(out, windows, (3, FINAL_NORM_OUTPUT), torch.float32).states(batch)
    whole = StoredFeatures.open(out, windows, (1, 3), torch.float32).states(batch)
    assert torch.equal(stored.aux, torch.cat([whole.aux[..., 32:], whole.final], -1))
    assert torch.equal(stored.final, whole.final)
    with pytest.raises(ConfigError, match=r"the inputs of the layers \[1, 3\], but the head also reads \[2\]"):
        StoredFeatures.open(out, windows, (1, 2), torch.float32)
