"""Proves: fresh weights are complete, repeat for a seed, differ between seeds, and make a model that can learn."""

import math

import torch

from rollforward.model.init import fresh_params
from rollforward.model.shapes import param_specs
from rollforward.model.transformer import Model
from tests.helpers.tiny import random_tokens, tiny_config


def test_names_shapes_and_repeatability() -> None:
    config = tiny_config()
    first, second, other = (fresh_params(config, seed=seed) for seed in (3, 3, 4))
    assert [(spec.name, spec.shape) for spec in param_specs(config)] == [(n, tuple(t.shape)) for n, t in first.items()]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    table = first["layers.0.ffn.gate.tid2eid"]
    assert table.dtype == torch.int64
    assert bool((table[:, 0] != table[:, 1]).all())
    assert set(table.unique().tolist()) == set(range(config.n_routed_experts))


def test_an_untrained_model_is_near_the_uniform_distribution() -> None:
    """Entropy within half a nat of log V, and no position predicts with certainty."""
    config = tiny_config()
    model = Model(config, fresh_params(config, seed=0), precision="native")
    log_probs = torch.log_softmax(model.logits(random_tokens(config, (2, 60))).double(), -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    assert float((math.log(config.vocab_size) - entropy).mean()) < 0.6
    assert float(log_probs.max()) < math.log(0.5)
