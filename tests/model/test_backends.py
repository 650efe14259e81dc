"""Proves: a process that cannot run a form says so by name before it chooses anything, and one that can takes them all.

Which process asks is proven where it starts: tests/rl/test_kernels_key.py. That forms compute is proven on a GPU.
"""

import importlib.util
from pathlib import Path

import msgspec
import pytest
import torch

from rollforward.conf.errors import user_error
from rollforward.kernels import dispatch
from rollforward.kernels.config import KernelBackends
from rollforward.kernels.errors import BackendError
from rollforward.kernels.loss import vocab_sweep
from rollforward.model.backends import check_model, check_programs, choose_kernels
from rollforward.model.config import preset
from tests.helpers.tiny import tiny_config


@pytest.fixture(autouse=True)
def _reference():
    yield
    dispatch.choose({})


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def test_a_machine_without_the_device_is_named_with_process_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError) as raised:
        choose_kernels(KernelBackends(mix="tile"), "engine-3")
    text = str(raised.value)
    assert text.startswith("kernels.mix is tile, which engine-3 on ")
    assert "no CUDA device" in text
    assert text.endswith("kernels.mix=reference")
    assert "\n" not in text
    assert user_error(raised.value) is raised.value, "it is told without a traceback"
    choose_kernels(KernelBackends(), "engine-3")


def test_a_device_of_another_kind_is_refused(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(BackendError, match=r"kernels\.reverse_kl is tile.*compute capability 8\.0"):
        choose_kernels(KernelBackends(reverse_kl="tile"), "engine-3")


def test_what_is_chosen_is_what_runs_and_a_refusal_changes_nothing(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_kernels(KernelBackends(mxfp4="tile", linear_logprob="tile"), "here")
    assert [op for op in dispatch.TILE_OPS if dispatch.is_tile(op)] == ["linear_logprob", "mxfp4"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(BackendError):
        choose_kernels(KernelBackends(mix="tile"), "here")
    assert [op for op in dispatch.TILE_OPS if dispatch.is_tile(op)] == ["linear_logprob", "mxfp4"]
    choose_kernels(KernelBackends(), "here")
    assert not any(map(dispatch.is_tile, dispatch.TILE_OPS))


def test_a_process_without_the_programs_libraries_is_told_what_to_install(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        BackendError, match=r"kernels\.mix is tile, which rank 2 on \S+ cannot run\. TileLang is not inst"
    ):
        choose_kernels(KernelBackends(mix="tile"), "rank 2")
    choose_kernels(KernelBackends(), "rank 2")


def test_programs_that_are_missing_are_counted_and_those_of_teachers_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dispatch.CACHE_VARIABLE, str(tmp_path))
    dispatch.path_of.cache_clear()
    kernels, config = KernelBackends(reverse_kl="tile"), preset("mini")
    check_programs(kernels, config, "DIR")
    check_programs(KernelBackends(), config, "DIR", teachers=[config])
    with pytest.raises(
        BackendError, match=r"kernels\.reverse_kl is tile, and (\d+) of its \1 programs for DIR \(vocab_size 129"
    ):
        check_programs(kernels, config, "DIR", teachers=[config])
    wanted = vocab_sweep.programs(config.vocab_size, config.hidden_size, config.hidden_size)
    for one in wanted[1:]:
        dispatch.path_of(one).touch()
    with pytest.raises(BackendError, match=rf"and 1 of its {len(set(wanted))} programs"):
        check_programs(kernels, config, "DIR", teachers=[config])
    dispatch.path_of(wanted[0]).touch()
    check_programs(kernels, config, "DIR", teachers=[config])
    with pytest.raises(BackendError, match=r"kernels\.mix is tile"):
        check_programs(KernelBackends(mix="tile"), config, "DIR")
    with pytest.raises(BackendError, match=r"kernels\.mxfp4 is tile"):
        check_programs(KernelBackends(mxfp4="tile"), config, "DIR")
    dispatch.path_of.cache_clear()


def test_a_models_own_sizes_are_asked() -> None:
    with pytest.raises(BackendError, match="DIR has hidden_size 128 and hc_mult 4"):
        check_model(KernelBackends(mix="tile"), tiny_config(), "DIR")
    everything = msgspec.convert(dict.fromkeys(dispatch.TILE_OPS, "tile"), KernelBackends)
    check_model(everything, preset("mini"), "DIR")
    with pytest.raises(BackendError, match="hc_mult 2"):
        check_model(everything, msgspec.structs.replace(preset("mini"), hc_mult=2), "DIR")
