"""Proves without a GPU that a forward makes every tensor where its weights are: the process's default device is `meta`,
whose tensors have no values, and not a bit of values, gradients, routes and cache is another.

On a real GPU: test_on_gpu.py.
"""

import contextlib

import pytest
import torch
from torch import Tensor

from rollforward.model.cache import allocate_cache, block_tokens
from rollforward.model.routing import Routing
from rollforward.model.scoring import ScoringBatch, hidden_logprobs, target_hidden, target_logprobs
from rollforward.model.segments import Segment, SegmentBatch
from rollforward.model.transformer import Transformer, packed_batch
from rollforward.model.weights import build_weights, published_tensors
from tests.helpers.tiny import random_params, random_tokens, tiny_config

CONFIG = tiny_config()
LENGTHS = (70, 1, 33)


def _batch() -> ScoringBatch:
    token_T = random_tokens(CONFIG, (sum(LENGTHS),))
    counts_T = torch.where(torch.arange(len(token_T)) % 3 == 0, 2, 0)
    targets = token_T.roll(-1)[counts_T > 0]
    return ScoringBatch(
        token_ids_T=token_T,
        sequence_lengths=LENGTHS,
        target_ids_T=token_T.roll(-1),
        scored_mask_T=torch.arange(len(token_T)) % 4 != 3,
        kept_counts_T=counts_T,
        kept_ids=torch.stack((targets, (targets + 1) % CONFIG.vocab_size), 1).flatten(),
    )


def _everything(elsewhere: bool, recompute: bool) -> dict[str, Tensor]:
    leaves = {name: one.requires_grad_(one.is_floating_point()) for name, one in random_params(CONFIG).items()}
    weights = build_weights(CONFIG, published_tensors(CONFIG, leaves))
    transformer, batch = Transformer(CONFIG, "native", recompute=recompute), _batch()
    routing = Routing(CONFIG, sequence_lengths=LENGTHS, sequence_weights=(0.2, 0.3, 0.5))
    num_blocks = 1 + -(-LENGTHS[0] // block_tokens(CONFIG))
    storage = allocate_cache(CONFIG, num_slots=1, num_blocks=num_blocks)
    pieces = [
        SegmentBatch([Segment(start=start, length=length, slot=0, blocks=tuple(range(1, num_blocks)))], window=16)
        for start, length in ((0, 50), (50, 1))
    ]
    mtp_batch = packed_batch(CONFIG, LENGTHS)
    with torch.device("meta") if elsewhere else contextlib.nullcontext():
        logprob_T, entropy_T = target_logprobs(transformer, weights, batch, temperature=0.7, routing=routing)
        (logprob_T.sum() + 0.1 * entropy_T.sum() + routing.balance_loss()).backward()
        found = {
            "logprobs": logprob_T,
            "entropies": entropy_T,
            "routes": routing.taken_TLK(),
            "loads": routing.load_LE(),
        }
        with torch.no_grad():
            hidden_RD = target_hidden(transformer, weights, batch)
            found["alone"], _ = hidden_logprobs(weights.head, hidden_RD, batch, temperature=0.7, chunk_tokens=16)
            streams_TMD = transformer.streams(
                weights, batch.token_ids_T, mtp_batch, routing=Routing(CONFIG, replay_TLK=found["routes"])
            )
            found["mtp"] = transformer.mtp_streams(weights, streams_TMD, batch.target_ids_T, mtp_batch)
            for index, piece in enumerate(pieces):
                tokens = batch.token_ids_T[piece.segments[0].start : piece.segments[0].end]
                found[f"cached {index}"] = transformer.streams(weights, tokens, piece, storage)
    found |= {f"gradient of {name}": one.grad for name, one in leaves.items() if one.grad is not None}
    return {name: one.detach() for name, one in (found | storage).items()}


@pytest.mark.parametrize("recompute", [False, True])
def test_a_forward_makes_its_tensors_where_its_weights_are(recompute: bool) -> None:
    expected, found = _everything(False, recompute), _everything(True, recompute)
    assert found.keys() == expected.keys()
    assert [name for name, one in found.items() if one.device.type != "cpu"] == []
    assert [name for name, one in found.items() if not torch.equal(one, expected[name])] == []


def test_a_cache_is_made_where_it_is_told() -> None:
    storage = allocate_cache(CONFIG, num_slots=1, num_blocks=2, device="meta")
    assert {plane.device.type for plane in storage.values()} == {"meta"}


def test_indices_are_copied_where_the_weights_are_and_not_made_twice() -> None:
    batch = packed_batch(CONFIG, LENGTHS)
    assert batch.on(torch.device("cpu")) is batch
    there = batch.on(torch.device("meta"))
    assert there.segments == batch.segments
    index = there.entry_index(4, overlap=True)
    for one in (there.query_GQ, there.row_T, there.window_index.visible_GQS, index.key_GS, index.raw_EL, there.slot_B):
        assert one.device.type == "meta"
