"""Proves the figures of `rollforward plan` against the published ones, that it says who updates what on which rank, and
what that takes, against the tensors of real trainers.

That it answers without torch is in test_config.py and tests/arch.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from rollforward.kernels.quant.formats import KV_GROUP
from rollforward.model import plan_model
from rollforward.model.config import preset
from rollforward.model.errors import ConfigError
from rollforward.model.optim_hybrid import StepGradients
from rollforward.model.plan import PlanRun, main
from rollforward.model.plan_learner import make_learner_plan
from rollforward.model.plan_model import index_key_bytes, kv_entry_bytes, make_plan
from rollforward.model.plan_text import render_learner_plan, render_plan
from rollforward.model.scoring import ScoringBatch
from rollforward.model.train_config import HybridMuon
from rollforward.model.trainer import LossPart, Trainer
from tests.helpers.ranks import run_on_ranks
from tests.helpers.tiny import random_params, random_tokens


def test_entry_sizes() -> None:
    assert kv_entry_bytes(preset("flash")) == 584
    assert index_key_bytes(preset("flash")) == 68
    assert plan_model.KV_GROUP == KV_GROUP, "plan may not import torch, so it states the group again"


def test_flash() -> None:
    flash = make_plan(preset("flash"))
    assert (flash.num_tensors, flash.num_bytes) == (69_187, 159_609_485_896)
    assert round(flash.num_parameters / 1e9, 2) == 284.33
    assert round(flash.num_mtp_parameters / 1e9, 2) == 6.61
    assert round(flash.num_activated_parameters / 1e9, 2) == 13.80
    assert round(flash.cache.per_token) == 3514
    assert flash.cache.window == 43 * 128 * 584
    assert flash.cache.state == 1024 * (21 * (64 + 16) + 20 * 512)


def test_pro() -> None:
    pro = make_plan(preset("pro"))
    assert (pro.num_tensors, pro.num_bytes) == (145_116, 864_704_792_696)
    assert round(pro.num_parameters / 1e9, 1) == 1573.0
    assert round(pro.num_mtp_parameters / 1e9, 1) == 25.8
    assert round(pro.num_activated_parameters / 1e9, 2) == 49.78
    assert round(pro.cache.per_token) == 5031


def test_main_writes_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PlanRun(model="flash")) == 0
    text = capsys.readouterr().out
    assert "69,187" in text
    assert "159,609,485,896" in text
    assert "3,514.2 bytes per token" in text
    learner = make_learner_plan(preset("flash"), PlanRun(model="flash"))
    assert text.startswith(
        render_plan("flash", make_plan(preset("flash"))) + "\n" + render_learner_plan(learner) + "\n"
    )


@pytest.mark.parametrize("model", ["tiny", "mini", "flash", "pro"])
def test_what_is_updated_adds_up_to_what_is_trained(model: str) -> None:
    config = preset(model)
    learner = make_learner_plan(config, PlanRun(model=model))
    updated = dict.fromkeys(("muon", "adamw", "frozen"), 0)
    for row in learner.rules:
        updated[row.rule.updater] += row.num_elements
    assert updated["muon"] == learner.dense.num_elements + learner.experts.num_elements
    assert updated["muon"] + updated["adamw"] == make_plan(config).num_trained_parameters


def test_the_assignment_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PlanRun(model="flash", zero_size=32, learner_ranks=256)) == 0
    text = capsys.readouterr().out
    assert "Muon dense: groups 8, ranks of a group 32, matrices 1,071 (a rank " in text
    assert "Muon experts: groups 1, ranks of a group 256, matrices 33,024 (a rank 129 to 129), shapes 1" in text
    assert re.search(r"elements a rank: most 189,267,968, mean 188,131,328, imbalance 1\.006, padding 0\.60%", text)
    assert re.search(r"Newton-Schulz GFLOP a rank: most 18,\d+\.\d, mean 17,\d+\.\d, imbalance 1\.089", text)
    assert re.search(r"gate biases +frozen +40 +0 +10,240  chooses experts only", text)
    assert re.search(r"grouped output projections muon +43 +344 .*split\.wo_a=groups", text)


def test_all_ranks_are_one_group_unless_said_otherwise() -> None:
    learner = make_learner_plan(preset("tiny"), PlanRun(model="tiny", zero_size=4))
    assert (len(learner.dense.shares), learner.dense.num_groups, len(learner.experts.shares)) == (4, 1, 4)


def test_impossible_ranks_are_refused_before_anything_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"no multiple of it.*Set zero_size=32 or learner_ranks=64"):
        main(PlanRun(model="flash", zero_size=64, learner_ranks=32))
    with pytest.raises(ConfigError, match="whole expert matrices"):
        main(PlanRun(model="tiny", zero_size=1, learner_ranks=64))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("ranks", "told"), [({"zero_size": 48}, "zero_size=32"), ({"learner_ranks": 6}, "ranks=4")])
def test_ranks_that_no_learner_can_have_are_refused(ranks: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"Set a power of two, such as .*{told}"):
        PlanRun(model="flash", **ranks)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _held_by_a_rank(rank: int, num_ranks: int, zero_size: int, directory: str) -> None:
    """Take a step of one micro-batch a rank and write down what the trainer's tensors take, under the plan's names."""
    config = preset("tiny")
    optim = HybridMuon(lr=1e-3, zero_size=zero_size)
    trainer = Trainer(config, random_params(config), precision="native", optim=optim)
    token_ids_T = random_tokens(config, (9,), seed=rank)
    batch = ScoringBatch(
        token_ids_T=token_ids_T,
        sequence_lengths=(9,),
        target_ids_T=token_ids_T.roll(-1),
        scored_mask_T=torch.arange(9) < 8,
    )
    optimizer: Any = trainer._optimizer
    zero = optimizer._adamw._engine.optimizer
    held: dict[str, int] = {}
    reduce, add = StepGradients.reduce, StepGradients.add

    def seen_add(self: Any, gradients: dict[str, Tensor]) -> None:
        held["gradients"] = _bytes(gradients.values())
        leaf = self._expert_leaf(gradients)
        assert leaf.dtype == torch.bfloat16
        held["expert_sums"] = leaf.nbytes
        add(self, gradients)

    def seen_reduce(self: Any) -> Any:
        held["dense_sums"] = _bytes(part for one in (self._adamw, self._dense) for part in one._partial)
        held["expert_sums"] += _bytes(part for one in self._experts._sums for part in one._partial)
        return reduce(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGradients, "add", seen_add)
        patch.setattr(StepGradients, "reduce", seen_reduce)
        trainer.train_step(
            [batch], lambda _, logprobs_T, __: LossPart(loss=-logprobs_T.sum(), name="x"), num_leaves=num_ranks
        )
    states = zero.optimizer.state.values()
    held |= {
        "muon_dense": _bytes((optimizer.dense.muon.masters, optimizer.dense.muon.momenta)),
        "muon_experts": _bytes((optimizer.experts.muon.masters, optimizer.experts.muon.momenta)),
        "adamw_parameters": _bytes(zero.bit16_groups_flat),
        "adamw_state": _bytes(zero.single_partition_of_fp32_groups)
        + _bytes(state[moment] for state in states for moment in ("exp_avg", "exp_avg_sq")),
        "published": sum(packed.num_bytes for packed in trainer.published().values()),
        "values": _bytes(trainer._published.values.values()),
    }
    (Path(directory) / f"{rank}.json").write_text(json.dumps(held))


@pytest.mark.parametrize(("num_ranks", "zero_size"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_real_rank_holds_what_is_planned(tmp_path: Path, num_ranks: int, zero_size: int) -> None:
    run_on_ranks(_held_by_a_rank, num_ranks, tmp_path, num_ranks, zero_size, str(tmp_path))
    held = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    fullest = {name: max(one[name] for one in held) for name in held[0]}
    learner = make_learner_plan(preset("tiny"), PlanRun(model="tiny", zero_size=zero_size, learner_ranks=num_ranks))
    assert fullest == msgspec.structs.asdict(learner.memory)
    assert learner.memory.total == sum(fullest.values())


def test_memory_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Flash's routed experts on 256 ranks: 129 matrices of 2048 x 4096 a rank, masters and momenta."""
    assert main(PlanRun(model="flash", zero_size=32, learner_ranks=256)) == 0
    text = capsys.readouterr().out
    assert re.search(rf"masters and momenta, Muon experts +{129 * 2048 * 4096 * 8:,}\n", text)
    assert re.search(r"published bytes, all tensors +159,609,485,896\n", text)


def test_unknown_model() -> None:
    with pytest.raises(ConfigError, match="Did you mean flash"):
        main(PlanRun(model="flahs"))
