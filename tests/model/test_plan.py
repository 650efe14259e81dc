"""Proves the figures of `rollforward plan` against the published ones and that it answers without torch."""

import pytest

from rollforward.kernels.quant.formats import KV_GROUP
from rollforward.model import plan
from rollforward.model.config import preset
from rollforward.model.errors import ConfigError
from rollforward.model.plan import PlanRun, index_key_bytes, kv_entry_bytes, main, make_plan, render_plan


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
    assert text == render_plan("flash", make_plan(preset("flash"))) + "\n"


def test_unknown_model() -> None:
    with pytest.raises(ConfigError, match="Did you mean flash"):
        main(PlanRun(model="flahs"))
