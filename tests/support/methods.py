"""Every drafting method over the tiny models, by the name of a case."""

from dataclasses import dataclass, replace
from pathlib import Path

from eyas.config import (
    DraftAheadConfig,
    DraftingConfig,
    LookaheadConfig,
    MethodsConfig,
    RestConfig,
    SuffixConfig,
    TreeConfig,
)
from eyas.drafters.base import LocalDrafter
from eyas.drafters.draft_head import DraftHead
from eyas.models.heads.eagle import write_head
from eyas.models.heads.eagle_config import HeadWiring
from eyas.models.heads.fusers import FeatureFuser
from tests.support.checkpoint_formats import TINY, random_tensors
from tests.support.tiny import write_small
from tests.support.tiny_block import tiny_block_head, tiny_peagle_head
from tests.support.tiny_medusa_hydra import KINDS, tiny_heads
from tests.support.tiny_mtp import tiny_mtp_module

# Names of cases: one or two methods, and after a hyphen what is particular about the case.
CASES = (
    "dspark", "dspark-rnn", "dspark-reduced", "dspark-crowded", "dflash", "dflash-window", "dflash2", "peagle",
    "dspark+prompt_lookup",
    "eagle1", "eagle2", "eagle3", "eagle3-normed", "eagle3-own-noise", "eagle3-crowded", "eagle3-ahead",
    "mtp", "mtp-crowded", "mtp-ahead",
    *KINDS, "sps", "sps-crowded", "prompt_lookup", "suffix", "rest", "lookahead", "eagle3+prompt_lookup-ahead",
    "eagle3+lookahead",
    "eagle3-int8", "dspark-int8", "dflash2-int8", "mtp-int8", "medusa-int8", "hydra-int8",
)  # fmt: skip
# Those of them whose drafts go another way outside of the drafter: one for each method, drafts ahead and rounded heads.
KINDS_OF_DRAFTS = tuple(name for name in CASES if name.partition("-")[2] in ("", "ahead", "normed", "prefix", "int8"))
# One of each class of drafters, and what wraps them.
CLASSES_OF_DRAFTERS = (
    "dspark", "eagle1", "eagle3", "eagle3-ahead", "mtp", "medusa", "hydra", "sps", "prompt_lookup", "suffix", "rest",
    "lookahead", "dspark+prompt_lookup", "eagle3-int8", "dspark-int8",
)  # fmt: skip
# EAGLE-3.1: a norm for each feature, and the normed state goes to the next level.
EAGLE31 = replace(TINY, input_norms="each", wiring=HeadWiring((1, 2, 3), output="normed"))
BLOCK_METHODS = ("dspark", "dflash", "dflash2")


def tiny_eagle31_head(head: str) -> str:
    """A head beside the one of `tiny_head`, written once."""
    folder = Path(head, "eagle31")
    if not folder.exists():
        write_head(folder, EAGLE31, random_tensors(EAGLE31))
    return str(folder)


@dataclass(frozen=True)
class Case:
    """A method over the tiny target; datastore: where REST looks. own_folder: a checkpoint in place of a tiny one."""

    name: str
    target: str
    head: str
    datastore: Path | None = None
    own_folder: str = ""

    @property
    def method(self) -> str:
        return self.name.partition("-")[0]

    def drafter(self, tree: TreeConfig, num_slots: int = 4096, proposal_top_k: int = 128) -> LocalDrafter:
        crowded, ahead = self.name.endswith("-crowded"), self.name.endswith("-ahead")
        drafting = DraftingConfig(
            max_kv_tokens=90 if crowded else num_slots,
            shared_noise=not self.name.endswith("-own-noise"),
            proposal_top_k=proposal_top_k,
            quantization="int8" if self.name.endswith("-int8") else "",
            draft_ahead=DraftAheadConfig(6, 16, 7, mode="always") if ahead else DraftAheadConfig(),
        )
        return DraftHead(self.folder, self.method).build_drafter(self.target, "float32", "cpu", tree, drafting, self.methods)

    @property
    def methods(self) -> MethodsConfig:
        """Settings for small trees."""
        rest = RestConfig(str(self.datastore), min_ngram=1) if self.datastore else RestConfig()
        lookahead = LookaheadConfig(window_size=2, ngram_size=3)
        return MethodsConfig(rest=rest, suffix=SuffixConfig(min_ngram=1), lookahead=lookahead)

    def fuser(self) -> FeatureFuser | None:
        return DraftHead(self.folder, self.method).build_fuser(self.target, "float32", "cpu")

    @property
    def folder(self) -> str:
        """What the method loads."""
        if self.own_folder:
            return self.own_folder
        if self.method in ("eagle1", "eagle2"):
            return f"{self.head}/eagle1"
        if self.name == "eagle3-normed":
            return tiny_eagle31_head(self.head)
        if self.method == "peagle":
            return tiny_peagle_head(self.head)
        if self.method.partition("+")[0] in BLOCK_METHODS:
            kind = self.name.partition("+")[0].removesuffix("-crowded").removesuffix("-int8")
            return tiny_block_head(kind, self.target)
        if self.method == "mtp":
            return tiny_mtp_module(self.target)
        if (kind := self.name.removesuffix("-int8")) in KINDS:
            return tiny_heads(kind, self.head)
        return write_small(self.target) if self.method == "sps" else self.head
