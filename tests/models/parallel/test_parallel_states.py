"""Ranks of a recurrent target: the rows of its states travel with the segments, and the output is that of one process."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from eyas.api.request import Request, SamplingParams
from eyas.cache.states import StateSizes, StateStep
from eyas.engine.build import assemble_engine, run_worker
from eyas.models.loading import load_target
from eyas.models.parallel.commands import CommandDecoder, CommandEncoder, InitKVCache
from eyas.models.parallel.shards import Shard
from eyas.models.parallel.workers import RankInfo, start_workers
from tests.models.parallel.test_commands import PLAN, make_segment, send
from tests.models.test_more_families import TREE
from tests.support.bad_drafters import KnowingDrafter
from tests.support.families import config_of, write_model
from tests.support.family_configs import HYBRIDS
from tests.support.reference import generated
from tests.support.runs import outputs_of, run, stats_of
from tests.support.tiers import nightly
from tests.support.tiny import fixed_config


def test_states_survive_the_wire() -> None:
    rng = np.random.default_rng(0)
    encoder = CommandEncoder()
    decoder = CommandDecoder()
    assert decoder.decode(encoder.encode(InitKVCache(9, PLAN, StateSizes(7, 32)))) == InitKVCache(9, PLAN, StateSizes(7, 32))
    steps = [
        StateStep(0, 1),
        StateStep(3, 2, pending=np.array([4, 6, 9]), stash=16),
        StateStep(5, 6, marks=((2, 7), (4, 8))),
        StateStep(1, 2, pending=np.array([31])),
    ]
    segments = [make_segment(rng, 5, rng.integers(0, 9, 3), n % 2 == 1)._replace(states=s) for n, s in enumerate(steps)]
    for own in (segments, segments[:1], [segment._replace(states=None) for segment in segments]):
        send(encoder, decoder, own)


@pytest.mark.parametrize("kind", ["qwen3_5_text", nightly("kimi_linear")])
def test_two_processes_equal_one(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, config_of(kind, **HYBRIDS[kind]))
    prompts = [tuple(range(3, 43)), (5, 9, 11)]
    asked = [Request(f"{turn}{i}", p, SamplingParams(9, 0.0, seed=0)) for turn in range(2) for i, p in enumerate(prompts)]
    expected = {request.id: generated(folder, request.prompt_ids) for request in asked}
    expected = {name: tokens[:9] for name, tokens in expected.items()}
    ranks = start_workers(RankInfo(0, 2, "cpu"), partial(run_worker, folder, "float32", 0))
    try:
        target = load_target(folder, shard=Shard(0, 2))
        config = fixed_config(max_kv_tokens=128, max_prefill_tokens=16, max_num_seqs=2, tensor_parallel_size=2)
        drafter = KnowingDrafter({r.id: [*r.prompt_ids, *expected[r.id]] for r in asked}, 48)
        chunks = run(assemble_engine(target, None, config, TREE, drafter, ranks), asked)
    finally:
        ranks.close()
    assert outputs_of(chunks) == expected
    assert stats_of(chunks).acceptance_length > 1.5
