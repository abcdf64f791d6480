"""Heads trained on a target whose law is known accept, through the engine, what theory predicts.

The target is a Markov chain in the shape of a Llama: attention and MLPs add nothing, embeddings are unit vectors, and
lm_head holds the law. From each token the next one in a ring has the probability SURE, all others share the rest.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eyas import LLM, SamplingParams
from eyas.config import DraftingConfig, TreeConfig
from eyas.train.data import prepare
from eyas.train.methods import build_trainer
from tests.support.tiers import nightly
from tests.support.tiny import fixed_config, write_spelling_tokenizer
from tests.train.small_runs import read_by, settings

SURE, RING, FIRST, VOCABULARY, HIDDEN = 0.8, 9, 3, 48, 64
DEPTHS, TOKENS = 3, 80  # documents are as long as what is generated
STEPS = {"dspark": 90, "dflash": 150, "peagle": 150}
RATES = {"dspark": 0.02, "dflash": 0.01, "peagle": 0.005}


def law() -> Tensor:
    """p(next | token) of the ring's tokens [RING, RING]."""
    rest = torch.full((RING, RING), (1 - SURE) / (RING - 1))
    return rest.fill_diagonal_((1 - SURE) / (RING - 1)).index_put(
        (torch.arange(RING), (torch.arange(RING) + 1) % RING), torch.tensor(SURE)
    )


def write_markov_target(folder: Path) -> str:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-6, bos_token_id=0, eos_token_id=1,
        pad_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.model.embed_tokens.weight.data = torch.eye(VOCABULARY, HIDDEN)
    logits = torch.full((VOCABULARY, HIDDEN), -20.0)
    logits[FIRST : FIRST + RING, FIRST : FIRST + RING] = law().log().T
    model.lm_head.weight.data = logits / HIDDEN**0.5  # the norm makes a unit vector sqrt(HIDDEN) long
    model.save_pretrained(folder)
    write_spelling_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("law")
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(RING, (128,), generator=generator)]
    for _ in range(TOKENS - 1):
        tokens.append(torch.multinomial(law()[tokens[-1]], 1, generator=generator)[:, 0])
    rows = (torch.stack(tokens, 1) + FIRST).tolist()
    (folder / "ids.jsonl").write_text("".join(json.dumps({"token_ids": row}) + "\n" for row in rows))
    found = write_markov_target(folder / "target")
    prepare(found, [folder / "ids.jsonl"], folder / "data", 0.0, TOKENS, 2, 0)
    return found


@cache
def trained(target: str, method: str) -> str:
    """Train a head that drafts DEPTHS tokens. Returns its folder."""
    folder, block_size = Path(target).parent, {"dspark": DEPTHS, "dflash": DEPTHS + 1}.get(method, 2)
    config = settings(
        folder, target, method, out=str(folder / method), optimizer__max_steps=STEPS[method], optimizer__batch_size=4,
        optimizer__learning_rate=RATES[method], data__max_length=TOKENS, **read_by(
            method, loss__num_anchors=16, loss__chunk_rows=0, loss__num_depths=DEPTHS, head__markov_rank=16,
            head__block_size=block_size,
        ),
    )  # fmt: skip
    trainer = build_trainer(config)
    for _ in range(STEPS[method]):
        trainer.step()
    trainer.trainee.write(folder / method / "head")
    return str(folder / method / "head")


def tau(target: str, method: str, head: str, temperature: float, **options: object) -> float:
    """Of chains through the engine, and the tokens of plain decoding if acceptance is by match."""
    acceptance = options.get("acceptance", "match")
    chain = TreeConfig(DEPTHS + 1, DEPTHS, 1)
    drafting = DraftingConfig(ranking_temperature=1.0, shared_noise=bool(options.get("shared_noise")))
    engine = fixed_config(acceptance=acceptance)  # type: ignore[arg-type]
    llm = LLM(target, head, method, "float32", "cpu", chain, engine, drafting, validate_head="never")
    prompts = [{"prompt_token_ids": [FIRST + index % RING] * 2} for index in range(18)]
    sampling = [SamplingParams(73, temperature, ignore_eos=True, seed=index) for index in range(18)]
    stats = [output.outputs[0].stats for output in llm.generate(prompts, sampling, use_tqdm=False)]  # type: ignore[arg-type]
    return sum(own.num_emitted for own in stats) / sum(own.num_verify_steps for own in stats)


def sampled_chain(conditional: bool) -> float:
    """tau under p/q of chains drawn from the law of each depth: given the token before it, or given the anchor only.

    With f(x) the chance that all tokens so far are accepted and the last is x, the next depth has sum over x of
    f(x) min(q(y), p(y | x)) for each y.
    """
    p, found = law(), 1.0
    reached, marginal = torch.eye(RING)[0], torch.eye(RING)[0]
    for _ in range(DEPTHS):
        marginal = marginal @ p
        reached = reached @ (p if conditional else torch.minimum(p, marginal))
        found += float(reached.sum())
    return found


METHODS = ("dspark", *(nightly(method) for method in ("dflash", "peagle")))
GREEDY = DEPTHS + 1.0
SAMPLED = sum(SURE**depth for depth in range(DEPTHS + 1))


@pytest.mark.parametrize("method", METHODS)
def test_greedy_chains_of_a_learned_law_are_accepted(method: str, target: str) -> None:
    assert tau(target, method, trained(target, method), 0.0) == pytest.approx(GREEDY, abs=0.1)


@pytest.mark.parametrize("method", METHODS)
def test_likeliest_chains_accept_powers_of_the_law(method: str, target: str) -> None:
    """Each proposed token is the target's draw with the probability SURE, at any depth."""
    assert tau(target, method, trained(target, method), 1.0) == pytest.approx(SAMPLED, abs=0.12)


def test_a_conditional_head_with_the_noise_foresees_draws(target: str) -> None:
    assert tau(target, "dspark", trained(target, "dspark"), 1.0, shared_noise=True) > GREEDY - 0.25


@pytest.mark.nightly
def test_sampled_chains_accept_the_overlap_of_the_laws(target: str) -> None:
    """A head that knows the token before it loses nothing under p/q; independent depths lose what the closed form says."""
    whole = tau(target, "dspark", trained(target, "dspark"), 1.0, acceptance="rejection")
    assert sampled_chain(conditional=True) == pytest.approx(GREEDY)
    assert whole > GREEDY - 0.25
    for method in ("dflash", "peagle"):
        independent = tau(target, method, trained(target, method), 1.0, acceptance="rejection")
        assert independent == pytest.approx(sampled_chain(conditional=False), abs=0.2), method
    assert sampled_chain(conditional=False) < GREEDY - 0.8
