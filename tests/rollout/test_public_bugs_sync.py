"""Public bugs of weight syncs between trainers and engines, one test each: ours does not do it, or says so.

Each is named after the project and the number of its issue; they were found where somebody else lost weeks.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from rollforward.model.fingerprint import INEXACT, value_fingerprint
from rollforward.model.precision import PackedTensor, unpack_published
from rollforward.model.shapes import TensorSpec, expert_name, is_stacked_expert, scale_name
from rollforward.rollout.engine.local import LocalEngine
from rollforward.rollout.errors import VersionRefusedError, WeightsError
from rollforward.rollout.weights import (
    WeightsAck,
    WeightsManifest,
    check_acknowledgement,
    check_version,
    publish_weights,
    version_directory,
)
from tests.helpers.replicas import fingerprints, make_requests, open_engine, packed_params
from tests.helpers.tiny import tiny_config

CONFIG = tiny_config()
TABLE = "layers.0.ffn.gate.tid2eid"
EXPERTS = "layers.1.ffn.experts.w1.weight"
DENSE = "layers.1.attn.wq_b.weight"
FIRST, SECOND = packed_params(CONFIG, seed=1), packed_params(CONFIG, seed=2)
Packed = dict[str, PackedTensor]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LocalEngine]:
    """Serves FIRST as version 1."""
    opened, log = open_engine(tmp_path / "engine", FIRST)
    with log:
        yield opened


def _check(engine: LocalEngine, packed: Packed) -> None:
    """The gate: what the engine shows against what was published."""
    manifest = WeightsManifest(policy_version=engine.policy_version or 0, tensors=fingerprints(CONFIG, packed))
    ack = WeightsAck(
        replica="engine-0",
        policy_version=manifest.policy_version,
        tensors=engine.fingerprints(),
        never_written=len(engine.never_written),
    )
    check_acknowledgement(manifest, ack)


def _sampled(engine: LocalEngine) -> list[bytes]:
    completions = engine.generate(make_requests([5, 20], max_new_tokens=6, version=engine.policy_version or 0))
    return [one.token_ids.tobytes() + one.behavior_logprobs.tobytes() for one in completions]


def _fresh(directory: Path, packed: Packed, version: int) -> list[bytes]:
    """What an engine samples that never had other weights."""
    opened, log = open_engine(directory, packed, version=version)
    with log:
        return _sampled(opened)


def _bits(engine: LocalEngine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.held_tensors().items()}


def _equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_miles_2706_tid2eid_left_out_of_the_sync(engine: LocalEngine) -> None:
    """A table that no sync writes keeps what was there (there: zeros), and the engine became a different model."""
    partial = {name: packed for name, packed in SECOND.items() if name != TABLE}
    with pytest.raises(WeightsError, match=r"weights 2 left 1 tensors unwritten \(layers\.0\.ffn\.gate\.tid2eid\)"):
        engine.load_weights(2, partial)
    for use in (lambda: engine.generate([]), lambda: engine.load_weights(3, SECOND), lambda: engine.score((1, 2))):
        with pytest.raises(WeightsError, match="serves nothing any more"):
            use()


def test_miles_2706_a_table_of_zeros_is_named(engine: LocalEngine) -> None:
    _check(engine, FIRST)
    engine.held_tensors()[TABLE].zero_()
    with pytest.raises(WeightsError, match=r"published layers\.0\.ffn\.gate\.tid2eid \(version 1\)"):
        _check(engine, FIRST)


@pytest.mark.parametrize("name", [EXPERTS, DENSE])
def test_verl_7224_scales_never_written(engine: LocalEngine, name: str, tmp_path: Path) -> None:
    """Payloads arrived, scales stayed zero, and the load "succeeded"."""
    scale = SECOND[name].scale
    assert scale is not None
    engine.load_weights(2, {**SECOND, name: msgspec.structs.replace(SECOND[name], scale=torch.zeros_like(scale))})
    with pytest.raises(WeightsError, match=rf"does not hold the published {name} \(version 2\)"):
        _check(engine, SECOND)
    publish_weights(tmp_path, 2, CONFIG, SECOND)
    directory = version_directory(tmp_path, 2)
    check_version(directory, CONFIG)
    (file,) = directory.glob("*.safetensors")
    content = file.read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    header = msgspec.json.decode(content[8:header_bytes])
    stored = scale_name(expert_name(name, 0) if is_stacked_expert(name) else name)
    begin, end = header[stored]["data_offsets"]
    file.write_bytes(content[: header_bytes + begin] + bytes(end - begin) + content[header_bytes + end :])
    with pytest.raises(VersionRefusedError, match=rf"weights 2 .*: {name} are not what manifest\.json says"):
        check_version(directory, CONFIG)


def test_vllm_42821_skyrl_1680_the_second_sync_corrupts(engine: LocalEngine, tmp_path: Path) -> None:
    """Layouts that a first load prepares were loaded over by the second as if they were raw."""
    for version, packed in ((2, SECOND), (3, FIRST), (4, SECOND)):
        engine.load_weights(version, packed)
        _check(engine, packed)
    assert _sampled(engine) == _fresh(tmp_path / "fresh", SECOND, 4)


def test_vllm_47221_zeros_loaded(engine: LocalEngine) -> None:
    """Experts were read from a buffer that nobody had filled."""
    engine.load_weights(2, SECOND)
    engine.held_tensors()[EXPERTS].zero_()
    with pytest.raises(WeightsError, match=rf"does not hold the published {EXPERTS}"):
        _check(engine, SECOND)


def test_vllm_47221_what_was_never_written_is_no_number(tmp_path: Path) -> None:
    """Memory of an engine that has not loaded yet is NaN and -1: whoever reads it sees it."""
    partial = {name: packed for name, packed in FIRST.items() if name not in (EXPERTS, TABLE)}
    with pytest.raises(WeightsError, match="left 2 tensors unwritten"):
        open_engine(tmp_path / "engine", partial)


def test_vllm_48284_a_reload_is_idempotent(engine: LocalEngine) -> None:
    """The same bytes loaded again gave other weights."""
    before = _bits(engine)
    engine.load_weights(2, FIRST)
    engine.load_weights(3, FIRST)
    assert _equal(_bits(engine), before)
    _check(engine, FIRST)


def test_vllm_41670_pointers_stay_over_a_reload(engine: LocalEngine) -> None:
    """A captured graph read memory that the reload had let go: what the forward was built on is what is written."""
    before = {name: value.data_ptr() for name, value in engine.held_tensors().items()}
    read = set(_pointers(engine._forward._weights))
    assert read == set(before.values())
    engine.load_weights(2, SECOND)
    assert {name: value.data_ptr() for name, value in engine.held_tensors().items()} == before
    assert set(_pointers(engine._forward._weights)) == read
    _check(engine, SECOND)


def _pointers(record: object) -> Iterator[int]:
    """Of all tensors below a record of the forward's."""
    if isinstance(record, Tensor):
        yield record.data_ptr()
    elif isinstance(record, tuple):
        for one in record:
            yield from _pointers(one)
    elif record is not None:
        for one in vars(record).values():
            yield from _pointers(one)


def test_verl_ascend_recipe_126_tid2eid_cast(engine: LocalEngine) -> None:
    """Through BF16 id 383 becomes 384: on the way to the engine, in it, and in what is hashed."""
    table = SECOND[TABLE].data
    cast = PackedTensor(format="bf16", data=table.to(torch.bfloat16))
    with pytest.raises(WeightsError, match=rf"{TABLE}: a bf16 value .* never cast"):
        engine.load_weights(2, {**SECOND, TABLE: cast})
    spec = TensorSpec(name=TABLE, shape=(2, 2), format="int64", trained=False)
    ids = torch.tensor([[383, 257], [1, 2]])
    assert value_fingerprint(spec, ids) != value_fingerprint(spec, ids.to(torch.bfloat16).to(torch.int64))
    assert value_fingerprint(spec, ids.to(torch.float32)) == INEXACT


@pytest.mark.parametrize("name", [EXPERTS, DENSE])
def test_verl_7519_copies_of_scales_go_stale(engine: LocalEngine, name: str, tmp_path: Path) -> None:
    """Kernels read a swizzled copy of the scales that only the first load made: here nothing but a scale changes."""
    scale = FIRST[name].scale
    assert scale is not None
    doubled = {**FIRST, name: msgspec.structs.replace(FIRST[name], scale=scale + 1)}
    engine.load_weights(2, doubled)
    assert torch.equal(engine.held_tensors()[name], 2 * unpack_published(FIRST[name]))
    _check(engine, doubled)
    assert _sampled(engine) == _fresh(tmp_path / "fresh", doubled, 2) != _fresh(tmp_path / "old", FIRST, 2)
