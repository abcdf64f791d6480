"""A GGUF file is served as its folder of safetensors would be: same tokens, same heads, same errors."""

import fcntl
import json
import logging
import re
import shutil
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="needs gguf: pip install -e '.[gguf]'")

import gguf
from transformers import AutoModelForCausalLM, GgufConfig

from eyas.api.request import SamplingParams
from eyas.config import DraftingConfig, EngineConfig, gguf_files
from eyas.config.file_values import check_source
from eyas.config.gguf_files import gguf_file, local_folder
from eyas.config.gguf_header import read_header
from eyas.config.target_limits import check_target
from eyas.drafters.draft_head import DraftHead
from eyas.errors import CheckpointError, ConfigError, MissingPackage
from eyas.llm import LLM
from eyas.models.checkpoint import resolve
from eyas.models.fingerprints import target_fingerprint
from eyas.models.supported import inspect_architecture
from eyas.models.unpacking import end_ids, llama3_divisors, readable_kinds, smallest, unpack
from tests.support.tiers import nightly, tiered
from tests.support.tiny import fixed_config, write_head, write_target
from tests.support.tiny_gguf import TEMPLATE, write_gguf

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
PROMPT = [5, 9, 17, 30, 12]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files, "HF_HOME", str(tmp_path_factory.mktemp("hub")))
        yield


@pytest.fixture(scope="module")
def file(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(target, tmp_path_factory.mktemp("gguf") / "tiny.gguf", "Q8_0")


def unpacked(file: Path) -> str:
    """The folder of a file, unpacked in this process: a new one imports torch again."""
    folder = file.parent / "unpacked"
    assert unpack(file, folder) == []
    return str(folder)


def greedy(llm: LLM, num_tokens: int = 24) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("kind", tiered(KINDS, tuple(KINDS)[:2]))
def test_tokens_are_those_of_transformers(kind: str, target: Path, tmp_path: Path) -> None:
    file = write_gguf(target, tmp_path / "tiny.gguf", kind)
    model: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
    with LLM(unpacked(file)) as llm:
        assert greedy(llm) == expected[0, len(PROMPT) :].tolist()
        assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("true12")) == "true12"


@pytest.mark.parametrize("temperature", [nightly(0.0), 0.8])
def test_a_head_drafts_for_a_file(temperature: float, file: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head", 48, 24, 32)
    sampling = SamplingParams(temperature=temperature, max_tokens=24, seed=3)
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[::-1]}]
    outputs = []
    for draft_model in (None, str(head)):
        method = "eagle3" if draft_model else None
        with LLM(str(file), draft_model, method, engine=fixed_config(max_kv_tokens=512), validate_head="never") as llm:
            outputs.append([output.outputs[0].token_ids for output in llm.generate(prompts, sampling, use_tqdm=False)])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("method", "asked", "dtype", "is_rounded", "of_file", "of_folder"),
    [
        ("eagle3", "", "float32", False, "int8", "none"),
        ("eagle3", "", "float32", True, "int8", "int8"),
        ("eagle3", "", "bfloat16", True, "none", "none"),
        ("eagle3", "none", "float32", True, "none", "none"),
        ("eagle3", "fp8", "float32", False, "fp8", "fp8"),
        ("suffix", "", "float32", True, "none", "none"),
        ("none", "", "float32", True, "none", "none"),
    ],
)
def test_heads_have_8_bits_next_to_such_weights(
    method: str, asked: Any, dtype: str, is_rounded: bool, of_file: str, of_folder: str, file: Path, target: Path
) -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    head = DraftHead("", method)
    for source, expected in ((file, of_file), (target, of_folder)):
        found = head.resolve_drafting(DraftingConfig(quantization=asked), str(source), dtype, "cpu", is_rounded)
        assert found.quantization == expected


def test_a_file_is_unpacked_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = resolve(str(file))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert resolve(str(file)) == resolve(str(file.parent)) == folder
    assert not caplog.records
    assert not list(folder.parent.glob("*.partial"))


@pytest.mark.nightly  # another process, which imports torch
def test_another_file_of_a_name_is_unpacked_too(file: Path, tmp_path: Path) -> None:
    other = tmp_path / file.name
    shutil.copy(file, other)
    folder = resolve(str(other))
    assert folder != resolve(str(file))
    assert target_fingerprint(folder) == target_fingerprint(str(file)) == target_fingerprint(unpacked(file))


def test_template_and_end_tokens_come_from_the_file(file: Path) -> None:
    folder = resolve(str(file))
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 2]


@pytest.mark.nightly  # another process, which imports torch
def test_tokenizer_beside_a_file_goes_first(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path)
    named = json.loads((resolve(str(file)) / "tokenizer.json").read_text())
    named["added_tokens"][2]["content"] = "<|other|>"
    named["model"]["vocab"]["<|other|>"] = named["model"]["vocab"].pop("<|im_end|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(named))
    with LLM(str(tmp_path)) as llm:
        assert llm.get_tokenizer().name_of(2) == "<|other|>"


def test_end_tokens_are_those_stated_and_named() -> None:
    tokens = {"tokenizer.ggml.tokens": ["a", "<|eot_id|>", "<end_of_turn>"], "tokenizer.ggml.token_type": [1, 3, 1]}
    assert end_ids({**tokens, "tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9}, [7, 8]) == [7, 9, 8, 1]
    assert end_ids({}, None) == []


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [([1.0, -2.5], torch.bfloat16), ([1.0009765625], torch.float16), ([1.0000001], torch.float32), ([1e-30], torch.float32)],
)
def test_no_number_changes_in_its_smallest_type(numbers: list[float], dtype: torch.dtype) -> None:
    stored = smallest(torch.tensor(numbers))
    assert stored.dtype == dtype
    assert torch.equal(stored.float(), torch.tensor(numbers))


def test_scaling_of_llama_3_is_restored(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(target, file, freqs=llama3_divisors(4, 10000.0, 32.0).astype(np.float32))
    config = json.loads(Path(unpacked(file), "config.json").read_text())
    assert config["rope_parameters"] == {
        "rope_theta": 10000.0, "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


def test_divisors_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
    config = LlamaConfig(head_dim=128, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-np.arange(64) / 64)
    np.testing.assert_allclose(plain / llama3_divisors(64, 500000.0, 8.0), scaled.numpy(), rtol=1e-5)


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "no type": ({"factor": 4.0, "finetuned": 1, "alpha": 1.0}, {"rope_type": "linear", "factor": 4.0}),
    "older key": ({"_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "none": ({"type": "none", "factor": 1.0, "original_context_length": 64}, {"rope_type": "default"}),
    "yarn": (
        {"type": "yarn", "factor": 4.0, "original_context_length": 64, "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0,
         "attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 2.0},
    ),
}  # fmt: skip


def scaling_values(values: dict[str, Any]) -> dict[str, Any]:
    return {f"rope__scale{key}" if key[0] == "_" else f"rope__scaling__{key}": value for key, value in values.items()}


@pytest.mark.parametrize("name", SCALINGS)
def test_other_scalings_are_restored(name: str, target: Path, tmp_path: Path) -> None:
    values, expected = SCALINGS[name]
    file = write_gguf(target, tmp_path / "tiny.gguf", **scaling_values(values))
    parameters = json.loads(Path(unpacked(file), "config.json").read_text())["rope_parameters"]
    assert parameters == {"rope_theta": 10000.0, **expected}


UNREAD: dict[str, tuple[dict[str, Any], str]] = {
    "longrope": ({"type": "longrope"}, "type = longrope"),
    "attention": ({"type": "yarn", "factor": 4.0, "attn_factor": 0.5}, "attn_factor = 0.5"),
    "yarn's attention": ({"type": "yarn", "factor": 4.0, "yarn_attn_factor": 2.0}, "yarn_attn_factor = 2.0"),
    "logarithm": ({"type": "yarn", "yarn_log_multiplier": 0.5}, "yarn_log_multiplier = 0.5"),
    "extrapolation": ({"type": "linear", "factor": 4.0, "yarn_ext_factor": 1.0}, "yarn_ext_factor = 1.0"),
    "none": ({"type": "none", "factor": 4.0}, "factor = 4.0 of the type none"),
    "unknown": ({"later": 2.0}, "later = 2.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_scalings_that_are_not_read_are_refused(name: str, target: Path, tmp_path: Path) -> None:
    values, reason = UNREAD[name]
    file = write_gguf(target, tmp_path / "tiny.gguf", **scaling_values(values))
    with pytest.raises(CheckpointError, match=rf"rotary embedding by rope\.scaling\.{reason}, which is not read"):
        unpack(file, tmp_path / "out")


def damage_kind(file: Path) -> None:
    """Let the header give one tensor a kind of numbers that no package unpacks."""
    data = bytearray(file.read_bytes())
    at = data.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", gguf.GGMLQuantizationType.Q8_K.value)
    file.write_bytes(data)


def damage_architecture(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b"llama", b"lhama"))


def write_header(kind: int, value: bytes, name: str = "general.alignment", tensors: bytes = b"") -> Any:
    """A writer of a file with one value and one tensor."""
    text = struct.pack("<Q", len(name)) + name.encode()
    data = b"GGUF" + struct.pack("<IQQ", 3, bool(tensors), 1) + text + struct.pack("<I", kind) + value + tensors
    return lambda file: file.write_bytes(data)


def one_tensor(num_dims: int, offset: int) -> bytes:
    return struct.pack(f"<QcI{num_dims}QIQ", 1, b"w", num_dims, *[1] * num_dims, 0, offset)


def split(file: Path) -> None:
    file.rename(file.with_name("a-00001-of-00003.gguf"))


def double(file: Path) -> None:
    shutil.copy(file, file.with_name("b.gguf"))


BROKEN: dict[str, tuple[Any, str]] = {
    "text": (lambda file: file.write_text("version https://git-lfs"), "it begins with b'vers', not with b'GGUF'; fetch"),
    "empty": (lambda file: file.write_bytes(b""), "it begins with b'', not with b'GGUF'"),
    "half a header": (lambda file: file.write_bytes(file.read_bytes()[:300]), "is not a GGUF file that can be read: "),
    "no header": (lambda file: file.write_bytes(b"GGUF"), "is not a GGUF file that can be read: .*; fetch"),
    "half": (lambda file: file.write_bytes(file.read_bytes()[:-2000]), "but the file ends at .*: it is truncated; fetch"),
    "version": (lambda file: file.write_bytes(b"GGUF\4" + file.read_bytes()[5:]), "has version 4 of the format"),
    "kind": (damage_kind, "weights of the kind Q8_K, which .* cannot unpack; take a file of another kind, such as Q4_K_M"),
    "architecture": (damage_architecture, "whose architecture is 'lhama': .*lhama is not supported"),
    "part": (split, r"part 1 of 3 .* --merge FIRST_PART a\.gguf"),
    "several": (double, r"holds 2 GGUF files: b\.gguf, tiny\.gguf; name one"),
    "alignment 0": (write_header(4, bytes(4)), r"general\.alignment is 0, which is not a power of two; fetch"),
    "alignment 48": (write_header(4, struct.pack("<I", 48)), r"general\.alignment is 48, which is not a power of two"),
    "alignments": (write_header(9, struct.pack("<IQI", 4, 1, 32)), r"general\.alignment is \[32\], which is not a power"),
    "arrays": (write_header(9, struct.pack("<IQ", 9, 1) * 3000), "its metadata holds arrays in an array; fetch"),
    "dimensions": (write_header(4, bytes(4), "a", one_tensor(5, 0)), "its tensor w has 5 dimensions, more than 4"),
    "offset": (write_header(4, bytes(4), "a", one_tensor(1, 1 << 40)), "w begins at .*, but the file ends at .*"),
    "size": (write_header(4, bytes(4), "a", one_tensor(1, 0)), "is truncated"),
    "freqs": (None, r"its rope_freqs\.weight is not how Llama 3 scales"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_refused(name: str, target: Path, tmp_path: Path) -> None:
    damage, message = BROKEN[name]
    file = write_gguf(target, tmp_path / "tiny.gguf", freqs=np.full(4, 3, np.float32) if name == "freqs" else None)
    if damage is not None:
        damage(file)
    with pytest.raises(CheckpointError, match=message) as caught:
        unpack(gguf_file(tmp_path) or file, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly  # another process, which imports torch
def test_what_a_process_refuses_is_an_error_here(target: Path, tmp_path: Path) -> None:
    file = write_gguf(target, tmp_path / "tiny.gguf")
    damage_kind(file)
    with pytest.raises(CheckpointError, match="weights of the kind Q8_K") as caught:
        LLM(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert not list(Path(gguf_files.HF_HOME, "eyas").glob("*.partial"))


def test_settings_are_checked_against_a_file(file: Path) -> None:
    check_source(str(file))
    with pytest.raises(ConfigError, match=r"max_model_len is 1000.* 256"):
        check_target(str(file), EngineConfig(max_model_len=1000))


@pytest.mark.nightly
def test_ranks_share_a_file(file: Path) -> None:
    with LLM(str(file)) as alone:
        tokens = greedy(alone)
    with LLM(str(file), tensor_parallel_size=2) as shared:
        assert greedy(shared) == tokens


def test_missing_packages_are_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = shutil.copy(file, tmp_path)
    monkeypatch.setattr(gguf_files, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(MissingPackage, match=r"reading .*tiny\.gguf needs the package gguf; run: pip install .*\[gguf\]"):
        local_folder(str(new))
    assert local_folder(str(file)) is not None  # unpacked already


def test_a_place_that_cannot_be_written_is_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = shutil.copy(file, tmp_path)
    (tmp_path / "taken").write_text("")
    monkeypatch.setattr(gguf_files, "HF_HOME", str(tmp_path / "taken"))
    with pytest.raises(CheckpointError, match=r"cannot unpack .* into .*taken/eyas: .*; name another place .* HF_HOME"):
        local_folder(str(new))


def test_the_lock_outlives_a_process_that_ends(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "HF_HOME", str(tmp_path))
    children = []

    def interrupted(command: Any, pass_fds: Any, **options: Any) -> Any:
        children.append(subprocess.Popen(["sleep", "60"], pass_fds=pass_fds))
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_files.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        local_folder(str(file))
    (name,) = tmp_path.glob("eyas/*.lock")
    with name.open("w") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        children[0].kill()
        children[0].wait()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


ENDINGS = {
    "reason": (1, "loading\nunpacking: x.gguf: wrong\nbye\n", "Traceback", "x.gguf: wrong"),
    "crash": (1, "loading\n", "Traceback\nKeyError: 'a'\n", "x.gguf cannot be unpacked: KeyError: 'a'"),
    "silence": (3, "", "", "x.gguf cannot be unpacked: exit status 3"),
    "killed": (-9, "", "", "x.gguf: the unpacker was killed by signal 9, probably out of memory; see docs/models.md"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_an_unpacker_that_fails_is_explained(name: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, stdout, stderr, expected = ENDINGS[name]
    monkeypatch.setattr(gguf_files, "HF_HOME", str(tmp_path))
    result = subprocess.CompletedProcess([], status, stdout, stderr)
    monkeypatch.setattr(gguf_files.subprocess, "run", lambda *words, **options: result)
    with pytest.raises(CheckpointError) as caught:
        local_folder(str(file))
    assert str(caught.value).replace(str(file), "x.gguf") == expected


def test_what_may_not_be_read_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path, *words: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    for method, source in (("open", file), ("iterdir", file.parent), ("stat", file)):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, forbidden)
            with pytest.raises(CheckpointError, match=re.escape(f"cannot read {str(source)!r}: Permission denied; name a")):
                local_folder(str(source))
    with pytest.raises(CheckpointError, match="File name too long"):
        check_source("x" * 300)


@pytest.mark.parametrize("name", ["nowhere.gguf", "owner/nowhere.gguf"])
def test_a_missing_file_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"no file at '{name}'; .* fetch that repository, and name its folder"):
        LLM(name)


def test_a_full_disk_is_named(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.models import unpacking

    monkeypatch.setattr(unpacking.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    file = write_gguf(target, tmp_path / "tiny.gguf")
    with pytest.raises(CheckpointError, match=r"GiB unpacked, and .* 0\.0 GiB free; name another place .* HF_HOME"):
        unpacking.unpack(file, tmp_path / "out")


def test_files_beside_other_weights_do_not_count(file: Path, target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path / "both")
    shutil.copy(file, tmp_path / "both")
    assert gguf_file(tmp_path / "both") is None
    assert local_folder(tmp_path / "both") == tmp_path / "both"
    assert local_folder("some/repository") is None


def test_header_is_that_of_the_package(file: Path) -> None:
    header, reader = read_header(file), gguf.GGUFReader(file)
    own = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == own
    assert [(one.name, one.shape, one.kind, one.offset) for one in header.tensors] == [
        (one.name, tuple(map(int, one.shape[::-1])), one.tensor_type.value, one.data_offset) for one in reader.tensors
    ]


def test_docs_name_the_kinds_that_are_read() -> None:
    page = " ".join(Path("docs/models.md").read_text().split())
    assert f"kinds of gguf 0.19: {', '.join(readable_kinds())}." in page


@pytest.mark.nightly
def test_docs_name_the_architectures_that_are_read() -> None:
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    page = Path("docs/models.md").read_text()
    rows = {
        line.split("|")[2].strip(): re.findall("`(.*?)`", line)
        for line in page.splitlines()
        if "`starcoder2`" in line or "`umt5`" in line
    }
    served, refused = rows["served"], rows["refused, as their folders are"]
    own = {name.replace("-", "_").replace("moe", "_moe") for name in served + refused}
    assert own == set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"}
    in_transformers = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text", "gemma4": "gemma4_text",
                       "deci": "llama", "minimax-m2": "minimax_m2", "gpt-oss": "gpt_oss"}  # fmt: skip
    stated = {"nemotron": {"num_key_value_heads": 8}}  # its default is no number
    for name in served:
        inspect_architecture(AutoConfig.for_model(in_transformers.get(name, name), **stated.get(name, {})))
