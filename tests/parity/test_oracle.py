"""The fp32 mode against transformers' own DeepSeek-V4 with the same weights: at most 1e-5 relative, by every route.

Three configs: flash-like, HCA first (pro-like), other ratios. 300 tokens reach every mechanism: the window wraps, both
kinds of entries exist, YaRN ramps, and from position 35 (other: 53) on the indexer drops entries.

Gradients too: at most 1e-4 of a tensor's largest entry.

Not proven here: quantisation (test_native_layers.py), bits (test_bit_contract.py). transformers' model is one more
reading of the released code; where it is silent (packing, MTP) tests/helpers/oracle.py follows the specification.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rollforward.model.transformer import Model, packed_batch
from tests.helpers.bits import relative_error
from tests.helpers.cached import CachedSequences
from tests.helpers.oracle import Oracle
from tests.helpers.tiny import oracle_config, random_params, random_tokens

TOLERANCE = 1e-5
LENGTH = 300
LENGTHS = (1, 3, 4, 5, 37, 127, 128, 129, 256, 260)


@dataclass(frozen=True)
class Pair:
    """Our model and the oracle with the same weights, and the oracle's logits of two sequences."""

    ours: Model
    oracle: Oracle
    token_BT: Tensor
    reference_BTV: Tensor


@pytest.fixture(scope="module", params=["flash", "pro", "other"])
def pair(request) -> Pair:
    config = oracle_config(request.param)
    params = random_params(config)
    oracle = Oracle(config, params)
    token_BT = random_tokens(config, (2, LENGTH))
    return Pair(Model(config, params, precision="fp32"), oracle, token_BT, oracle.logits(token_BT))


def test_prefill(pair):
    assert relative_error(pair.ours.logits(pair.token_BT), pair.reference_BTV) <= TOLERANCE


def test_every_mechanism_is_reached(pair):
    # The comparison above would mean little if the oracle's logits were flat or top-k never dropped an entry.
    config = pair.ours.config
    assert pair.reference_BTV.std() > 0.3
    ratio = config.compress_rates.compressed_sparse_attention
    assert LENGTH // ratio > 2 * config.index_topk
    assert LENGTH // config.compress_rates.heavily_compressed_attention >= 2
    assert config.sliding_window < LENGTH // 2


@pytest.mark.parametrize("length", LENGTHS)
def test_shorter_prompts_end_on_the_full_runs_row(pair, length):
    logits = pair.ours.logits(pair.token_BT[:1, :length])
    assert relative_error(logits, pair.reference_BTV[:1, :length]) <= TOLERANCE
    assert relative_error(logits[:, -1], pair.reference_BTV[:1, length - 1]) <= TOLERANCE


@pytest.mark.parametrize("prefix", [1, 3, 4, 126, 250])
def test_decode_after_a_prefix(pair, prefix):
    cache = CachedSequences(pair.ours, num_slots=2, max_tokens=LENGTH, seed=prefix)
    for slot in range(2):
        cache.step([(slot, pair.token_BT[slot, :prefix])])
    for position in range(prefix, prefix + 8):
        rows = cache.step([(slot, pair.token_BT[slot, position : position + 1]) for slot in (1, 0)])
        logits = torch.cat(rows[::-1])
        assert relative_error(logits, pair.reference_BTV[:, position]) <= TOLERANCE, position


@pytest.mark.parametrize(("chunk", "length"), [(7, 140), (50, LENGTH), (130, LENGTH)])
def test_chunked_prefill(pair, chunk, length):
    cache = CachedSequences(pair.ours, num_slots=1, max_tokens=LENGTH, seed=chunk)
    logits = cache.run(0, pair.token_BT[0, :length], chunk)
    assert relative_error(logits, pair.reference_BTV[0, :length]) <= TOLERANCE


def test_packed_sequences_equal_separate_ones(pair):
    # Lengths end inside windows of both compressors, so that a leak over a border would show.
    config, lengths = pair.ours.config, (5, 131, 1, 66, 43)
    sequences = [random_tokens(config, (1, length), seed=length) for length in lengths]
    batch = packed_batch(config, lengths)
    with torch.no_grad():
        streams = pair.ours.transformer.streams(pair.ours.weights, torch.cat(sequences, 1)[0], batch)
        packed = pair.ours.transformer.logits(
            pair.ours.weights, pair.ours.transformer.hidden(pair.ours.weights, streams)
        )
    for sequence, rows in zip(sequences, packed.split(lengths), strict=True):
        assert relative_error(rows, pair.oracle.logits(sequence)[0]) <= TOLERANCE


def test_mtp(pair):
    token_BT = pair.token_BT[:, :200]
    assert relative_error(pair.ours.mtp_logits(token_BT), pair.oracle.mtp_logits(token_BT)) <= TOLERANCE


def test_residual_streams_before_the_head(pair):
    # MTP and teachers read these; the head mix alone could hide an error in one stream.
    token_T = pair.token_BT[0, :140]
    with torch.no_grad():
        streams = pair.ours.transformer.streams(pair.ours.weights, token_T, packed_batch(pair.ours.config, [140]))
    assert relative_error(streams, pair.oracle.streams(token_T[None])[0]) <= TOLERANCE


def test_gradients(pair):
    # transformers differentiates its own forward; ours are written by hand. Each tensor is compared at its own scale.
    config, token_BT = pair.ours.config, pair.token_BT[:1, :150]
    cotangent = torch.randn(pair.reference_BTV[:1, :150].shape, generator=torch.Generator().manual_seed(5))
    expected = pair.oracle.gradients(token_BT, cotangent)
    masters = {name: value.clone() for name, value in random_params(config).items()}
    leaves = [value.requires_grad_(True) for name, value in masters.items() if name in expected]
    model = Model(config, masters, precision="fp32")
    streams = model.transformer.streams(model.weights, token_BT[0], packed_batch(config, [150]))
    logits = model.transformer.logits(model.weights, model.transformer.hidden(model.weights, streams))
    gradients = torch.autograd.grad((logits * cotangent[0]).sum(), leaves, allow_unused=True)
    names = [name for name in masters if name in expected]
    assert len(names) > 20 * config.num_hidden_layers
    for name, gradient in zip(names, gradients, strict=True):
        if ".indexer." in name:
            assert gradient is None, name
        else:
            assert relative_error(gradient, expected[name]) <= 1e-4, name
