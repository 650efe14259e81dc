"""Proves the figures of `rollforward plan` against the published ones, and that it says who updates what on which rank.

That it answers without torch is in test_config.py and tests/arch.
"""

import re

import pytest

from rollforward.kernels.quant.formats import KV_GROUP
from rollforward.model import plan
from rollforward.model.config import preset
from rollforward.model.errors import ConfigError
from rollforward.model.plan import (
    PlanRun,
    index_key_bytes,
    kv_entry_bytes,
    main,
    make_learner_plan,
    make_plan,
    render_learner_plan,
    render_plan,
)


def test_entry_sizes() -> None:
    assert kv_entry_bytes(preset("flash")) == 584
    assert index_key_bytes(preset("flash")) == 68
    assert plan.KV_GROUP == KV_GROUP, "plan may not import torch, so it states the group again"


def test_flash() -> None:
    flash = make_plan(preset("flash"))
    assert (flash.num_tensors, flash.num_bytes) == (69_187, 159_609_485_896)
    assert round(flash.num_parameters / 1e9, 2) == 284.33
    assert round(flash.num_mtp_parameters / 1e9, 2) == 6.61
    assert round(flash.num_activated_parameters / 1e9, 2) == 13.80
    assert round(flash.kv_bytes_per_token) == 3514
    assert flash.window_bytes_per_sequence == 43 * 128 * 584
    assert flash.state_bytes_per_sequence == 1024 * (21 * (64 + 16) + 20 * 512)


def test_pro() -> None:
    pro = make_plan(preset("pro"))
    assert (pro.num_tensors, pro.num_bytes) == (145_116, 864_704_792_696)
    assert round(pro.num_parameters / 1e9, 1) == 1573.0
    assert round(pro.num_mtp_parameters / 1e9, 1) == 25.8
    assert round(pro.num_activated_parameters / 1e9, 2) == 49.78
    assert round(pro.kv_bytes_per_token) == 5031


def test_main_writes_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PlanRun(model="flash")) == 0
    text = capsys.readouterr().out
    assert "69,187" in text
    assert "159,609,485,896" in text
    assert "3,514.2 bytes per token" in text
    learner = make_learner_plan(preset("flash"), PlanRun(model="flash"))
    assert text == render_plan("flash", make_plan(preset("flash"))) + "\n" + render_learner_plan(learner) + "\n"


@pytest.mark.parametrize("model", ["tiny", "flash", "pro"])
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
    with pytest.raises(ConfigError, match="Set zero_size=32 or learner_ranks=288"):
        main(PlanRun(model="flash", zero_size=48, learner_ranks=256))
    with pytest.raises(ConfigError, match="whole expert matrices"):
        main(PlanRun(model="tiny", zero_size=1, learner_ranks=64))
    assert capsys.readouterr().out == ""


def test_unknown_model() -> None:
    with pytest.raises(ConfigError, match="Did you mean flash"):
        main(PlanRun(model="flahs"))
