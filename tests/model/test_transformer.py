"""The model as users hold it: inputs that make no sense, gradients, loading.

Not proven here: values (parity/test_oracle.py), bits (parity/test_bit_contract.py), readers of damaged files
(model/test_checkpoint.py).
"""

import json
import subprocess
import sys

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from rollforward.kernels.loss.logprob import token_logprob
from rollforward.model.cache import allocate_cache
from rollforward.model.checkpoint import write_checkpoint
from rollforward.model.config import config_json
from rollforward.model.errors import ModelError, ModelInputError
from rollforward.model.segments import Segment, SegmentBatch
from rollforward.model.shapes import param_specs
from rollforward.model.transformer import Model, load_model, packed_batch
from tests.helpers.bits import different_bits, torch_threads
from tests.helpers.tiny import random_params, random_tokens, tiny_config


@pytest.fixture(scope="module")
def params():
    return random_params(tiny_config())


@pytest.fixture(scope="module")
def model(params) -> Model:
    return Model(tiny_config(), params, precision="native")


def test_logits_are_one_float32_row_per_position(model):
    token_BT = random_tokens(model.config, (2, 7))
    logits = model.logits(token_BT)
    assert logits.shape == (2, 7, model.config.vocab_size)
    assert logits.dtype == torch.float32
    assert not logits.requires_grad
    assert model.mtp_logits(token_BT).shape == (2, 6, model.config.vocab_size)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        (torch.tensor([[0, 512]]), "512"),
        (torch.tensor([[0, -1]]), "-1"),
        (torch.zeros(0, 5, dtype=torch.int64), "at least one token"),
        (torch.zeros(2, 0, dtype=torch.int64), "T >= 1"),
        (torch.zeros(5, dtype=torch.int64), r"\[B, T\]"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), r"\[B, T\]"),
        (torch.zeros(1, 3), "int64"),
        (torch.zeros(1, 3, dtype=torch.int32), "int64"),
    ],
)
def test_token_ids_that_make_no_sense_are_refused(model, token_ids, message):
    with pytest.raises(ModelInputError, match=message):
        model.logits(token_ids)


def test_mtp_needs_two_tokens_and_valid_ids(model):
    with pytest.raises(ModelInputError):
        model.mtp_logits(torch.tensor([[3]]))
    with pytest.raises(ModelInputError, match="512"):
        model.mtp_logits(torch.tensor([[3, 512]]))


def test_a_model_without_mtp_says_so():
    config = msgspec.structs.replace(tiny_config(), num_nextn_predict_layers=0, compress_ratios=(0, 4, 32, 4))
    model = Model(config, random_params(config), precision="fp32")
    assert model.logits(torch.tensor([[1, 2]])).shape == (1, 2, 512)
    with pytest.raises(ModelInputError, match="MTP"):
        model.mtp_logits(torch.tensor([[1, 2]]))


def test_flat_ids_must_match_the_segments(model):
    batch = packed_batch(model.config, [3, 2])
    for wrong in (torch.zeros(4, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)):
        with pytest.raises(ModelInputError, match="5 tokens"):
            model.transformer.streams(model.weights, wrong, batch)


def test_slots_and_storage_come_together(model):
    storage = allocate_cache(model.config, num_slots=2, num_blocks=3)
    one_token = torch.tensor([3])
    cached = SegmentBatch([Segment(start=4, length=1, slot=1, blocks=(1,))], window=16)
    with pytest.raises(ModelInputError, match="storage is absent"):
        model.transformer.streams(model.weights, one_token, cached)
    with pytest.raises(ModelInputError, match="storage is given"):
        model.transformer.streams(model.weights, one_token, packed_batch(model.config, [1]), storage)
    with pytest.raises(ModelInputError, match="storage is absent"):
        model.transformer.mtp_streams(model.weights, torch.zeros(1, 4, 128), one_token, cached)
    assert all(not plane.any() for plane in storage.values())  # nothing was written


def test_too_few_blocks_are_an_error_and_block_zero_stays_zero(model):
    storage = allocate_cache(model.config, num_slots=2, num_blocks=3)
    batch = SegmentBatch(
        [Segment(start=0, length=33, slot=0, blocks=(1, 2)), Segment(start=0, length=33, slot=1, blocks=())], window=16
    )
    with pytest.raises(ModelInputError, match="segment 1"):
        model.transformer.streams(model.weights, random_tokens(model.config, (66,)), batch, storage)
    assert all(not plane[0].any() for name, plane in storage.items() if name.endswith("entries"))


def packed_loss(masters: dict[str, torch.Tensor], precision: str) -> torch.Tensor:
    """Cross-entropy of three packed sequences of few different tokens: many rows gather the same weights."""
    model = Model(tiny_config(), masters, precision=precision)
    token_T = random_tokens(tiny_config(), (121,)) % 5
    sizes = [70, 17, 33]
    batch = packed_batch(model.config, sizes)
    streams = model.transformer.streams(model.weights, token_T[:-1], batch)
    logits = model.transformer.logits(model.weights, model.transformer.hidden(model.weights, streams))
    logprob, entropy = token_logprob(logits, token_T[1:], temperature=1.0)
    return -(logprob.mean() + 0.01 * entropy.mean())


def trained_masters(params) -> dict[str, torch.Tensor]:
    return {
        name: value.clone().requires_grad_(value.is_floating_point() and not name.startswith("mtp."))
        for name, value in params.items()
    }


@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_repeat_bit_for_bit(params, threads):
    masters = trained_masters(params)
    leaves = {name: value for name, value in masters.items() if value.requires_grad}
    runs = []
    with torch_threads(threads):
        for _ in range(10 if threads == 1 else 3):
            loss = packed_loss(masters, "native")
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            runs.append({name: value for name, value in zip(leaves, gradients, strict=True) if value is not None})
    for run in runs:
        assert run.keys() == runs[0].keys()
        for name, gradient in run.items():
            assert torch.isfinite(gradient).all(), name
            assert different_bits(gradient, runs[0][name]) == 0, name


def test_every_trained_tensor_gets_a_gradient_and_only_those(params):
    masters = trained_masters(params)
    packed_loss(masters, "native").backward()
    for spec in param_specs(tiny_config()):
        got = masters[spec.name].grad
        if spec.trained:
            assert got is not None, spec.name
            assert bool(got.any()), spec.name
        elif spec.format != "int64":
            assert got is None, spec.name


def test_no_accumulating_scatter_is_on_the_way_back(params):
    # index_put with accumulation (the gradient of x[index]) adds in an order that changes from run to run.
    names, stack = set(), [packed_loss(trained_masters(params), "native").grad_fn]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.add(node.name())
        stack += [following for following, _ in node.next_functions]
    assert len(seen) > 300
    assert not {name for name in names if "IndexPut" in name or name.startswith(("IndexBackward", "TakeBackward"))}


def test_load_model_reads_what_write_checkpoint_wrote(tmp_path, params, model):
    config = tiny_config()
    write_checkpoint(tmp_path / "model", config, params)
    token_BT = random_tokens(config, (1, 40))
    native = load_model(tmp_path / "model", precision="native")
    assert native.config == config
    assert different_bits(native.logits(token_BT), model.logits(token_BT)) == 0
    # The file holds published values: in fp32 mode they are taken as they are.
    loaded = load_model(str(tmp_path / "model"), precision="fp32")
    assert loaded.logits(token_BT).shape == (1, 40, 512)
    assert different_bits(loaded.logits(token_BT), model.logits(token_BT)) > 0


def test_load_model_is_importable_from_the_package_which_costs_no_torch_before():
    code = (
        "import sys; import rollforward.model.config; assert 'torch' not in sys.modules; "
        "from rollforward.model import load_model; import rollforward.model.transformer as home; "
        "assert load_model is home.load_model"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ImportError, match="nothing_here"):
        from rollforward.model import nothing_here  # noqa: F401


def test_load_model_reads_plain_float32_tensors(tmp_path, params):
    config = tiny_config()
    official = {}
    for name, value in params.items():
        if ".experts." in name:
            before, matrix = name.split(".experts.")
            official |= {f"{before}.experts.{e}.{matrix}": value[e].contiguous() for e in range(value.shape[0])}
        else:
            official[name] = value
    save_file(official, tmp_path / "oracle.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_json(config)))
    token_BT = random_tokens(config, (1, 40))
    for precision in ("fp32", "native"):
        expected = Model(config, params, precision=precision).logits(token_BT)
        assert different_bits(load_model(tmp_path, precision=precision).logits(token_BT), expected) == 0


def test_load_model_errors_are_typed(tmp_path, params):
    with pytest.raises(ModelError, match="config"):
        load_model(tmp_path / "nowhere", precision="fp32")
    (tmp_path / "config.json").write_text(json.dumps(config_json(tiny_config())))
    with pytest.raises(ModelError):
        load_model(tmp_path, precision="fp32")
    with pytest.raises(ModelInputError, match=r"device is 'cuda:99'; this machine has \d+ CUDA devices"):
        load_model(tmp_path, precision="fp32", device="cuda:99")
    with pytest.raises(ModelInputError, match="device is 'tpu'"):
        load_model(tmp_path, precision="fp32", device="tpu")
    with pytest.raises(ModelInputError, match="half"):
        load_model(tmp_path, precision="half")
