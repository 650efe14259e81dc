"""The must-pass list of the model specification (section 8.4), item by item.

1. Fixed vectors: kernels/mhc/test_sinkhorn.py, attention/test_rope.py, moe/test_gate.py, quant/.
2. Prefill(T) ends on the full run's row: parity/test_oracle.py::test_shorter_prompts_end_on_the_full_runs_row.
3. Prefill + decode = full: parity/test_oracle.py::test_decode_after_a_prefix, parity/test_bit_contract.py.
4. Odd chunks: parity/test_oracle.py::test_chunked_prefill, parity/test_bit_contract.py.
5. Packed = separate: parity/test_oracle.py::test_packed_sequences_equal_separate_ones, and here.
6. State reset between sequences: here, for prompts that complete no entry.
7. Speculative rollback: no drafts in this version.
8. A prefix that ends inside blocks and windows: here and parity/test_bit_contract.py::test_copied_prefill_*.
9. tid2eid stays integer: here, through publishing, saving and loading; kernels side in model/test_moe.py.
10. FP4 -> FP8 -> value: kernels/quant/test_mxfp4.py.
11. Byte count of an exported checkpoint: model/test_plan.py.
12. Chat round trip: model/test_encoding.py.
"""

import pytest
import torch

from rollforward.model.checkpoint import read_checkpoint, write_checkpoint
from rollforward.model.precision import pack_published, published_value, unpack_published
from rollforward.model.shapes import param_specs
from rollforward.model.transformer import Model, packed_batch
from tests.helpers.bits import different_bits
from tests.helpers.cached import CachedSequences
from tests.helpers.tiny import oracle_config, random_params, random_tokens, tiny_config


@pytest.fixture(scope="module")
def model() -> Model:
    config = oracle_config("flash")  # ratios 4 and 128, blocks of 128 tokens
    return Model(config, random_params(config), precision="native")


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_6_a_short_prompt_does_not_mix_with_the_slots_last_sequence(model, length):
    # The released code keeps the overlap state of the sequence before when a prompt has fewer than 4 tokens.
    token_T = random_tokens(model.config, (30,), seed=length)
    alone = model.logits(token_T[None])[0]
    cache = CachedSequences(model, num_slots=1, max_tokens=300)
    for leftover in (random_tokens(model.config, (299,), seed=77), random_tokens(model.config, (131,), seed=78)):
        cache.run(0, leftover, 150)
        cache.restart(0)
        rows = [
            cache.step([(0, token_T[:length])])[0],
            cache.run(0, token_T[length:12], 1),
            cache.run(0, token_T[12:], 18),
        ]
        assert different_bits(torch.cat(rows), alone) == 0
        cache.restart(0)


@pytest.mark.parametrize("prefix", [1, 31, 127, 129, 130, 200, 255])
def test_8_a_reused_prefix_that_is_no_multiple_of_a_block(model, prefix):
    token_T = random_tokens(model.config, (prefix + 6,), seed=prefix)
    expected = model.logits(token_T[None])[0, prefix:]
    cache = CachedSequences(model, num_slots=2, max_tokens=300, seed=prefix)
    cache.step([(0, token_T[:prefix])])
    cache.copy(0, [1])
    assert different_bits(cache.run(1, token_T[prefix:], 4), expected) == 0
    assert different_bits(cache.run(0, token_T[prefix:], 6), expected) == 0  # the source is as good as before


def test_5_packing_crosses_no_border_at_any_length(model):
    token_T = random_tokens(model.config, (40,))
    for first in range(1, 14):
        lengths = [first, 20, 40 - first - 20]
        batch = packed_batch(model.config, lengths)
        with torch.no_grad():
            streams = model.transformer.streams(model.weights, token_T, batch)
        alone = packed_batch(model.config, [20])
        with torch.no_grad():
            expected = model.transformer.streams(model.weights, token_T[first : first + 20], alone)
        assert different_bits(streams[first : first + 20], expected) == 0, first


def test_9_tid2eid_is_int64_through_publishing_saving_and_loading(tmp_path):
    config = tiny_config()
    params = random_params(config)
    tables = [spec for spec in param_specs(config) if spec.name.endswith("tid2eid")]
    assert len(tables) == config.num_hash_layers
    write_checkpoint(tmp_path / "model", config, params)
    loaded = read_checkpoint(tmp_path / "model", config)
    for spec in tables:
        assert spec.format == "int64"
        assert not spec.trained
        for copy in (
            loaded[spec.name],
            published_value(spec.format, params[spec.name]),
            unpack_published(pack_published(spec, params[spec.name])),
        ):
            assert copy.dtype == torch.int64
            assert torch.equal(copy, params[spec.name])
    served = Model(config, loaded, precision="native").weights.blocks[0].ffn.tid2eid
    assert served.dtype == torch.int64
