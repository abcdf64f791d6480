"""Frequencies as a draft law: a trie in, log-shares of siblings out, perturbed by the noise of the target's draw.

The formula is that of `eyas.drafters.ranking`, over the nodes that were found, all levels at once.
Legend: S sessions, K nodes, F families of siblings, C most of one, G values of s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from eyas.config import EagleConfig
from eyas.drafters.base import DraftContext
from eyas.drafters.calibration import Laws, NoiseScale
from eyas.drafters.lookup.matches import Floats, Ints, Trie
from eyas.models.sampling.keys import filtering, filters_of
from eyas.models.sampling.law import MIN_TEMPERATURE, filtered_law
from eyas.models.sampling.noise import exponential_noise_at, signed
from eyas.models.tensors import upload


class Frequencies:
    """Shares of one propose call, of which the scale is told. At temperature 0, or without shared noise, plain ones."""

    def __init__(self, contexts: Sequence[DraftContext], config: EagleConfig, scale: NoiseScale) -> None:
        self._contexts = contexts
        self._noises = [context.noise for context in contexts]
        self._scale = scale
        self._shared_S = np.array([config.shared_noise and noise.temperature > 0 for noise in self._noises])

    def log_shares(self, trie: Trie) -> Floats:
        """Log-shares [K] of nodes among their siblings."""
        plain = trie.log_shares()
        if not self._shared_S.any():
            self._scale.skip()
            return plain
        perturbed = self._perturbed(trie)
        softness = np.array([self._scale.value(noise.temperature) for noise in self._noises])[trie.sessions]
        scaled = perturbed / softness
        noisy = scaled - _normalisers(trie, scaled[:, None])[trie.families, 0]
        if self._scale.grid:
            self._tell(trie, noisy, _normalisers(trie, perturbed[:, None] / np.array(self._scale.grid)))
        self._scale.skip()
        return np.where(self._shared_S[trie.sessions], noisy, plain)

    def _perturbed(self, trie: Trie) -> Floats:
        """[K], up to a constant of each family."""
        seeds = np.array([signed(noise.seed) for noise in self._noises])[trie.sessions]
        positions = np.array([context.committed for context in self._contexts])[trie.sessions] + trie.depths
        tokens = torch.from_numpy(trie.tokens)[:, None]
        noise = exponential_noise_at(torch.from_numpy(seeds), torch.from_numpy(positions), tokens)
        perturbed: Floats = self._law(trie) - np.log(noise[:, 0].double().numpy())
        return perturbed

    def _law(self, trie: Trie) -> Floats:
        """Logarithms [K] of what temperature and filters make of the weights, up to a constant of each family."""
        if all(noise.top_k == 0 and noise.top_p >= 1 and noise.min_p == 0 for noise in self._noises):
            temperatures = np.array([max(noise.temperature, MIN_TEMPERATURE) for noise in self._noises])
            tempered: Floats = np.log(trie.weights) / temperatures[trie.sessions]
            return tempered
        columns = np.arange(len(trie.tokens)) - trie.starts[trie.families]
        logits_FC = np.full((len(trie.starts), int(columns.max()) + 1), -np.inf, np.float32)
        logits_FC[trie.families, columns] = np.log(trie.weights)
        noises = [self._noises[session] for session in trie.sessions[trie.starts]]
        cpu = torch.device("cpu")
        law_FC = filtered_law(torch.from_numpy(logits_FC), filters_of(noises, cpu), upload(filtering(noises), cpu))
        law: Floats = law_FC.log().double().numpy()[trie.families, columns]
        return law

    def _tell(self, trie: Trie, log_shares: Floats, normalisers: Floats) -> None:
        """Tell the scale what each session with shared noise was offered, under which laws [F, G]."""
        scores = trie.along_paths(log_shares)
        for session in np.unique(trie.sessions[self._shared_S[trie.sessions]]).tolist():
            nodes = np.flatnonzero(trie.sessions == session)
            families = trie.families[nodes]
            firsts = np.flatnonzero(np.diff(families, prepend=-1))
            laws = Laws(
                starts=np.append(firsts, len(nodes)),
                tokens=trie.tokens[nodes],
                scores=scores[nodes],
                groups=_places(trie.parents[nodes[firsts]], nodes),
                normalisers=normalisers[families[firsts]],
            )
            self._scale.note(self._contexts[session], laws)


def _places(parents: Ints, nodes: Ints) -> Ints:
    """Place of each parent among nodes, from 1; 0 for the root."""
    places: Ints = np.where(parents < 0, 0, np.searchsorted(nodes, parents) + 1)
    return places


def _normalisers(trie: Trie, scores: Floats) -> Floats:
    """logsumexp of scores [K, G] over each family [F, G]."""
    most = np.maximum.reduceat(scores, trie.starts)
    sums = np.add.reduceat(np.exp(scores - most[trie.families]), trie.starts)
    normalisers: Floats = most + np.log(sums)
    return normalisers
