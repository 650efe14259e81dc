"""Proves: every tensor has one updater for one reason, and Muon's matrices cover its tensors exactly once, for every
choice where the report is silent. Does not prove that the choices are DeepSeek's."""

import itertools
import re
from collections import defaultdict
from typing import get_args, get_type_hints

import pytest

from rollforward.model.config import ModelConfig, preset
from rollforward.model.matrices import (
    LogicalMatrix,
    MuonSplit,
    TensorRole,
    declared_rules,
    dense_matrices,
    expert_matrices,
    tensor_roles,
)
from rollforward.model.shapes import is_stacked_expert, param_specs

CHOICES = {name: get_args(literal) for name, literal in get_type_hints(MuonSplit).items()}
EVERY_SPLIT = [MuonSplit(**dict(zip(CHOICES, values, strict=True))) for values in itertools.product(*CHOICES.values())]
MODELS = ("tiny", "mini", "flash", "pro")


def by_name(config: ModelConfig, split: MuonSplit | None = None) -> dict[str, TensorRole]:
    return {role.spec.name: role for role in tensor_roles(config, split or MuonSplit())}


def blocks(role: TensorRole) -> list[tuple[int, int, int, int]]:
    return [(matrix.row, matrix.column, matrix.num_rows, matrix.num_columns) for matrix in role.matrices]


def covers_once(role: TensorRole) -> bool:
    """Blocks inside the tensor, pairwise apart, as many elements as it has: so every element once."""
    *leading, rows, columns = role.spec.shape
    by_expert: dict[int, list[LogicalMatrix]] = defaultdict(list)
    for matrix in role.matrices:
        assert matrix.tensor == role.spec.name
        assert 0 <= matrix.row < matrix.row + matrix.num_rows <= rows
        assert 0 <= matrix.column < matrix.column + matrix.num_columns <= columns
        by_expert[matrix.expert].append(matrix)
    assert sorted(by_expert) == list(range(leading[0] if leading else 1))
    for inside in by_expert.values():
        for one, other in itertools.combinations(inside, 2):
            apart_in_rows = one.row + one.num_rows <= other.row or other.row + other.num_rows <= one.row
            apart_in_columns = one.column + one.num_columns <= other.column
            assert apart_in_rows or apart_in_columns or other.column + other.num_columns <= one.column
    return sum(matrix.num_elements for matrix in role.matrices) == role.spec.num_elements


@pytest.mark.parametrize("name", MODELS)
def test_every_trained_element_has_one_updater(name: str) -> None:
    config = preset(name)
    roles = tensor_roles(config, MuonSplit())
    assert [role.spec for role in roles] == list(param_specs(config))
    for role in roles:
        assert role.spec.trained == (role.rule.updater != "frozen")
        assert covers_once(role) if role.rule.updater == "muon" else role.matrices == ()


@pytest.mark.parametrize("split", EVERY_SPLIT, ids=lambda split: "-".join(getattr(split, name) for name in CHOICES))
def test_every_choice_covers_every_element_once(split: MuonSplit) -> None:
    for role in tensor_roles(preset("tiny"), split):
        assert role.rule.updater != "muon" or covers_once(role)


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_no_rule_is_idle(name: str) -> None:
    names = [spec.name for spec in param_specs(preset(name))]
    for rule in declared_rules(MuonSplit()):
        assert any(re.fullmatch(rule.pattern, tensor) for tensor in names), rule.title


def test_who_updates_what_on_tiny() -> None:
    # Layers 0 to 3: window (and hash), CSA, HCA, CSA.
    updater = {name: role.rule.updater for name, role in by_name(preset("tiny")).items()}
    for name in (
        "embed.weight",
        "head.weight",
        "norm.weight",
        "layers.0.attn.attn_sink",
        "layers.1.attn.q_norm.weight",
    ):
        assert updater[name] == "adamw", name
    for name in ("layers.0.hc_attn_base", "layers.0.hc_ffn_scale", "hc_head_base", "layers.1.attn.compressor.ape"):
        assert updater[name] == "adamw", name
    for name in ("layers.1.ffn.gate.bias", "layers.0.ffn.gate.tid2eid", "layers.1.attn.indexer.wq_b.weight"):
        assert updater[name] == "frozen", name
    assert {value for name, value in updater.items() if name.startswith("mtp.")} == {"frozen"}
    for name in (
        "layers.0.ffn.gate.weight",
        "layers.0.hc_attn_fn",
        "hc_head_fn",
        "layers.2.attn.compressor.wkv.weight",
    ):
        assert updater[name] == "muon", name


def test_vectors_are_never_muons() -> None:
    for split in EVERY_SPLIT:
        assert all(len(role.spec.shape) >= 2 for role in tensor_roles(preset("tiny"), split) if role.matrices)


def test_every_frozen_tensor_says_why() -> None:
    frozen = {rule.title: rule.reason for rule in declared_rules(MuonSplit()) if rule.updater == "frozen"}
    assert list(frozen) == ["gate biases", "token-to-expert tables", "indexers", "MTP"]
    assert all(frozen.values())


def test_blocks_by_hand_on_flash() -> None:
    roles = by_name(preset("flash"))
    assert blocks(roles["layers.5.hc_attn_fn"]) == [(0, 0, 4, 16384), (4, 0, 4, 16384), (8, 0, 16, 16384)]
    assert blocks(roles["hc_head_fn"]) == [(0, 0, 4, 16384)]
    assert blocks(roles["layers.0.attn.wo_a.weight"]) == [(1024 * group, 0, 1024, 4096) for group in range(8)]
    assert blocks(roles["layers.0.attn.wq_b.weight"]) == [(0, 0, 32768, 1024)]
    csa, hca = roles["layers.2.attn.compressor.wkv.weight"], roles["layers.3.attn.compressor.wkv.weight"]
    assert blocks(csa) == [(0, 0, 512, 4096), (512, 0, 512, 4096)]
    assert blocks(hca) == [(0, 0, 512, 4096)]
    down = roles["layers.7.ffn.experts.w2.weight"]
    assert [matrix.expert for matrix in down.matrices] == list(range(256))
    assert set(blocks(down)) == {(0, 0, 4096, 2048)}


def test_other_choices_by_hand_on_flash() -> None:
    split = MuonSplit(hc_fn="whole", csa_compressor="whole", wo_a="whole", wq_b="heads", ape="muon")
    roles = by_name(preset("flash"), split)
    assert blocks(roles["layers.5.hc_attn_fn"]) == [(0, 0, 24, 16384)]
    assert blocks(roles["layers.2.attn.compressor.wgate.weight"]) == [(0, 0, 1024, 4096)]
    assert blocks(roles["layers.0.attn.wo_a.weight"]) == [(0, 0, 8192, 4096)]
    assert blocks(roles["layers.0.attn.wq_b.weight"]) == [(512 * head, 0, 512, 1024) for head in range(64)]
    assert blocks(roles["layers.2.attn.compressor.ape"]) == [(0, 0, 4, 1024)]
    halves = by_name(preset("flash"), MuonSplit(ape="muon"))
    assert blocks(halves["layers.2.attn.compressor.ape"]) == [(0, 0, 4, 512), (0, 512, 4, 512)]
    assert blocks(halves["layers.3.attn.compressor.ape"]) == [(0, 0, 128, 512)]


def test_experts_lie_down_first_then_gate_then_up() -> None:
    config = preset("tiny")
    flat = expert_matrices(tensor_roles(config, MuonSplit()))
    expected = [
        (f"layers.{layer}.ffn.experts.{matrix}.weight", expert)
        for matrix in ("w2", "w1", "w3")
        for layer in range(config.num_hidden_layers)
        for expert in range(config.n_routed_experts)
    ]
    assert [(matrix.tensor, matrix.expert) for matrix in flat] == expected


def test_dense_and_experts_are_all_of_muons() -> None:
    roles = tensor_roles(preset("flash"), MuonSplit())
    dense, experts = dense_matrices(roles), expert_matrices(roles)
    assert sorted(dense + experts) == sorted(matrix for role in roles for matrix in role.matrices)
    assert not any(is_stacked_expert(matrix.tensor) for matrix in dense)
    assert (len(dense), sum(matrix.num_elements for matrix in dense)) == (1_071, 6_020_202_496)
    assert (len(experts), sum(matrix.num_elements for matrix in experts)) == (33_024, 277_025_390_592)


@pytest.mark.parametrize(
    ("rows", "columns", "flops"),
    [(2, 3, 640), (3, 2, 640), (1, 1, 60), (2048, 4096, 100 * 2048**3)],
)
def test_newton_schulz_work(rows: int, columns: int, flops: int) -> None:
    # 10 (4 n^2 m + 2 n^3); for m = 2n that is 100 n^3.
    matrix = LogicalMatrix(tensor="x", num_rows=rows, num_columns=columns)
    assert matrix.flops == flops
    assert matrix.ns_shape == (min(rows, columns), max(rows, columns))
