"""`eyas bench offline`: plain decoding, speculative decoding and `generate` in one process, batch by batch in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from eyas.api.request import SamplingParams
from eyas.bench.results import (
    GENERATE,
    LOOKUP,
    PLAIN,
    SPECULATIVE,
    OfflineResults,
    SpeedComparison,
    StageTimes,
)
from eyas.bench.settings import OfflineSettings, Prompt, groups, load_prompts
from eyas.bench.timing import (
    Contender,
    EngineContender,
    GenerateContender,
    run_in_turn,
    summarise,
    timed_stages,
)
from eyas.config import DraftingConfig, EngineConfig
from eyas.device.placement import use_threads
from eyas.drafters.base import Drafter
from eyas.drafters.draft_head import DraftHead
from eyas.engine.build import assemble_engine
from eyas.models.checkpoint import Checkpoint
from eyas.models.heads.fusers import FeatureFuser
from eyas.models.loading import load_target
from eyas.models.placement import pass_dtype, resolve_placement
from eyas.models.target import TargetModel
from eyas.progress import Progress

Contenders = dict[str, Contender]


@dataclass(frozen=True)
class BenchParts:
    """Loaded models. Without a method, fuser and drafter are None."""

    target: TargetModel
    fuser: FeatureFuser | None
    drafter: Drafter | None


def measure(
    settings: OfflineSettings, progress: Progress, found: Callable[[SpeedComparison], object] = lambda _: None
) -> OfflineResults:
    """Take every measurement. Raises EyasError for models and prompts that cannot be used.

    found: called with each comparison as soon as it is there, as what follows may be interrupted.
    """
    progress.show("loading models")
    settings, parts = load(settings)
    prompts = load_prompts(settings, parts.target.vocab_size)
    contenders = build_contenders(settings, parts, prompts)
    comparisons = list[SpeedComparison]()
    for temperature, batch in product(settings.temperatures, settings.batches):
        comparisons.append(compare(settings, contenders, prompts, temperature, batch, progress))
        progress.print(str(comparisons[-1]))
        found(comparisons[-1])
    return OfflineResults(comparisons)


def load(settings: OfflineSettings) -> tuple[OfflineSettings, BenchParts]:
    """Load the target, and with a method its drafter; set torch's threads.

    Returns the settings with what they leave open, method and levels of its trees, too. Raises CheckpointError;
    ConfigError for an unknown method or device.
    """
    target = Checkpoint(settings.model)
    head = DraftHead(settings.draft_model, settings.method, target)
    device, dtype = resolve_placement(settings.device, settings.dtype, target)
    passes = pass_dtype(target, dtype, device, EngineConfig(), settings.threads)
    use_threads(settings.threads, (device, passes))
    resolved = replace(settings, method=head.method, tree=head.resolve_tree(settings.tree))
    if not head.drafts:
        return resolved, BenchParts(load_target(target, dtype, device, passes=passes), None, None)
    fuser = head.build_fuser(target, passes, device)
    # graphs take seconds to capture: none for noise that no draw has, nor for more sessions than there will be
    drafting = DraftingConfig(shared_noise=any(settings.temperatures), cuda_graph_max_batch=max(settings.batches))
    drafter = head.build_drafter(target, passes, device, settings.tree, drafting)
    layers = fuser.aux_hidden_state_layers if fuser else ()
    return resolved, BenchParts(load_target(target, dtype, device, layers, passes=passes), fuser, drafter)


def engine_contenders(settings: OfflineSettings, parts: BenchParts, config: EngineConfig) -> Contenders:
    """Build a plain engine, which collects no features, and with a drafter a speculative one, on shared weights."""
    target = parts.target
    plain = assemble_engine(target.with_features(), None, config, settings.tree, None)
    contenders: Contenders = {PLAIN: EngineContender(plain, target.device)}
    if parts.drafter is not None:
        config = replace(config, draft_budget=settings.draft_budget)
        engine = assemble_engine(target, parts.fuser, config, settings.tree, parts.drafter)
        contenders[SPECULATIVE] = EngineContender(engine, target.device)
    return contenders


def build_contenders(settings: OfflineSettings, parts: BenchParts, prompts: Sequence[Prompt]) -> Contenders:
    """Build the engines for all batches, and `generate`, alone and with prompt lookup."""
    longest, batch = max(map(len, prompts)) + settings.max_tokens, max(settings.batches)
    max_kv_tokens = batch * (longest + settings.tree.num_draft_tokens)
    config = EngineConfig(max_kv_tokens=max_kv_tokens, max_num_seqs=batch, prefix_cache=False)
    generate = GenerateContender(settings.model, settings.dtype, parts.target.device)
    return engine_contenders(settings, parts, config) | {GENERATE: generate, LOOKUP: generate.with_lookup()}


def compare(
    settings: OfflineSettings,
    contenders: Contenders,
    prompts: Sequence[Prompt],
    temperature: float,
    batch: int,
    progress: Progress,
) -> SpeedComparison:
    """Decode all batches of one size with every contender, then time the stages."""
    sampling = settings.sampling(temperature)
    left_out = {GENERATE, LOOKUP} if temperature > 0 else {LOOKUP} if batch > 1 else set()
    contenders = {name: each for name, each in contenders.items() if name not in left_out}
    batches = groups(prompts, batch, settings.num_groups)[: settings.max_groups or None]
    runs = run_in_turn(contenders, batches, sampling, progress, f"temperature {temperature:g}, batch {batch}")
    return SpeedComparison.of(temperature, batch, runs, stages(contenders, batches[0], sampling))


def stages(
    contenders: Mapping[str, Contender], prompts: Sequence[Prompt], sampling: SamplingParams
) -> dict[str, StageTimes]:
    """Time the stages of the engines' steps over one batch."""
    found = {}
    for name, contender in contenders.items():
        if isinstance(contender, EngineContender):
            with timed_stages(contender.engine, contender.now) as clock:
                contender.run(prompts, sampling)
            found[name] = summarise(clock.steps, waited=("forward", "drafts") if name == SPECULATIVE else ("forward",))
    return found
