"""A draft head's folder is looked at once, whatever is built from it."""

from collections.abc import Callable
from typing import Any

import pytest

from eyas import LLM
from eyas.config import DraftingConfig, TreeConfig
from eyas.drafters import draft_head
from eyas.drafters.draft_head import DraftHead


def counted(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        calls.append(function.__name__)
        return function(*args)

    return call


def test_a_head_is_detected_once_for_all_that_is_built(
    tiny_target: str, tiny_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("read_config", "find_eagle_kind"):
        monkeypatch.setattr(draft_head, name, counted(getattr(draft_head, name), calls))
    head = DraftHead(tiny_head)
    assert head.method == "eagle3"
    assert head.resolve_tree(TreeConfig(8)).num_steps == 5
    assert head.features_fingerprint()
    assert head.build_fuser(tiny_target, "float32", "cpu") is not None
    head.build_drafter(tiny_target, "float32", "cpu", TreeConfig(8, 2, 2), DraftingConfig(max_kv_tokens=64))
    assert calls == ["read_config", "find_eagle_kind"]


def test_an_llm_detects_its_head_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(draft_head, "find_eagle_kind", counted(draft_head.find_eagle_kind, calls))
    with LLM("models/demo/target", draft_model="models/demo/eagle3", max_kv_tokens=256):
        assert calls == ["find_eagle_kind"]
