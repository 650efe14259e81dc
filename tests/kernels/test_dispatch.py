"""Proves: a form is named and never replaced, a program has one file by all it depends on, and nothing compiles at run
time. One small program is compiled for sm_90a, with its registers and products looked at; no GPU is needed.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollforward.kernels import dispatch
from rollforward.kernels.dispatch import program
from rollforward.kernels.errors import BackendError, ProgramMissingError, ShapeError
from rollforward.kernels.loss import vocab_sweep
from rollforward.kernels.mhc import mix_sweep
from rollforward.kernels.quant import mxfp4_sweep
from tests.helpers.source import ROOT, imports, modules

ONE = program("loss.vocab_tile", "hidden_grad", V=512, D=256, tile_d=256, pitch=512)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(dispatch.CACHE_VARIABLE, str(tmp_path))
    dispatch.path_of.cache_clear()
    dispatch.bind.cache_clear()
    yield
    dispatch.path_of.cache_clear()
    dispatch.bind.cache_clear()
    dispatch.choose({})


def test_an_op_runs_as_its_reference_unless_told():
    assert not dispatch.is_tile("reverse_kl")
    dispatch.choose({"reverse_kl": "reference"})
    assert not dispatch.is_tile("reverse_kl")


@pytest.mark.parametrize("backends", [{"reverse_kl": "cuda"}, {"no_such_op": "tile"}])
def test_a_form_that_does_not_exist_is_refused(backends):
    with pytest.raises(BackendError, match="forms are reference and"):
        dispatch.choose(backends)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_form_that_this_machine_cannot_run_is_refused():
    with pytest.raises(BackendError, match="no CUDA device"):
        dispatch.choose({"reverse_kl": "tile"})
    assert not dispatch.is_tile("reverse_kl")


def test_a_program_that_is_not_compiled_is_an_error():
    with pytest.raises(ProgramMissingError, match="rollforward kernels warm"):
        dispatch.bind(ONE)


def test_a_programs_file_follows_its_constants():
    others = [
        program("loss.vocab_tile", "hidden_grad", V=512, D=256, tile_d=128, pitch=512),
        program("loss.vocab_tile", "logprob_rows", V=512, tile_v=256),
    ]
    assert len({dispatch.path_of(one) for one in (ONE, *others)}) == 3
    assert dispatch.path_of(
        program("loss.vocab_tile", "hidden_grad", tile_d=256, D=256, V=512, pitch=512)
    ) == dispatch.path_of(ONE)


def test_tile_files_import_nothing_of_ours():
    """Else a program would outlive a change of what it was made from."""
    tiles = [module for module in modules() if module.path.endswith("_tile.py")]
    assert tiles
    assert [
        f"{module.path}:{found.line}"
        for module in tiles
        for found in imports(module)
        if found.name.startswith("rollforward")
    ] == []


def test_every_tile_op_has_its_files():
    for op, place in dispatch.TILE_OPS.items():
        path = ROOT / "kernels" / Path(*place.split("."))
        assert path.name == op
        for suffix in (".py", "_ref.py", "_bench.py"):
            assert path.with_name(path.name + suffix).is_file()


def test_ops_import_without_the_compiler():
    code = (
        "import sys, rollforward.kernels.loss.reverse_kl, rollforward.kernels.loss.linear_logprob\n"
        "assert not {'tilelang', 'ray', 'deepspeed', 'hydra'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_program_is_compiled_once_and_found_again():
    assert dispatch.warm([ONE], jobs=1) == (1, 0)
    assert dispatch.warm([ONE, ONE], jobs=1) == (0, 1)
    assert [path.name for path in dispatch.cache_directory().iterdir()] == [dispatch.path_of(ONE).name]
    # Another process finds it, and needs no compiler.
    code = (
        "import sys\nfrom rollforward.kernels import dispatch\n"
        "dispatch.bind(dispatch.program('loss.vocab_tile', 'hidden_grad', V=512, D=256, tile_d=256, pitch=512))\n"
        "assert 'tilelang' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


PRODUCTS = {"logits", "student_logits", "hidden_grad", "streams_backward"}
"""Functions whose programs multiply matrices."""

MULTIPROCESSOR = {"registers": 65536, "shared_bytes": 233472, "reserved_bytes": 1024}
"""What blocks share on a device of compute capability 9.0, and shared memory of each block that CUDA takes itself."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "wanted",
    [
        *vocab_sweep.programs(129280, 1024, 4096),
        *(one for D in (1024, 4096, 7168) for one in mix_sweep.programs(D, 20)),
        *(one for one in mxfp4_sweep.programs(512, 1024) if ("bf16", True) not in one.constants),
    ],
    ids=str,
)
def test_machine_code(wanted):
    """Programs of the mini model, and those of hyper-connections at the widths of Flash and Pro, spill nothing; their
    products are those of sm_90a; and a block that waits for others of its launch is resident with all of them: the
    driver starts them at once or refuses, and a multiprocessor has room for one."""
    from rollforward.kernels.build_tile import report

    code = report(wanted, dispatch.TARGET)
    assert code.spilled_bytes == 0
    assert (code.products > 0) == (wanted.function in PRODUCTS)
    assert code.cooperative == (wanted.function == "across")
    if code.products or code.cooperative:  # which move registers between warps: a block starts with what it ends with
        assert code.registers <= 168
    assert code.registers * code.threads <= MULTIPROCESSOR["registers"]
    assert code.shared_bytes + MULTIPROCESSOR["reserved_bytes"] <= MULTIPROCESSOR["shared_bytes"]


@pytest.mark.parametrize("multiprocessors", [28, 78, 114, 132, 144])
@pytest.mark.parametrize("D", [512, 1024, 2304, 4096, 7168])
@pytest.mark.parametrize("count", [1, 16, 17, 500, 100_000])
def test_a_launch_across_has_a_multiprocessor_for_each_block(D, count, multiprocessors, monkeypatch):
    """Its blocks are as many as the rows of what they tell each other in."""
    monkeypatch.setattr(mix_sweep, "_multiprocessors", lambda _: multiprocessors)
    groups, parts = mix_sweep.exchange(count, D, torch.device("cpu")).rounds.shape
    assert parts == D // mix_sweep.COLUMNS
    assert 1 <= groups * parts <= multiprocessors
    assert groups <= -(-count // mix_sweep.TOKENS)


def test_a_row_that_no_device_holds_is_refused(monkeypatch):
    monkeypatch.setattr(mix_sweep, "_multiprocessors", lambda _: 27)
    with pytest.raises(ShapeError, match="28 blocks hold a row, and this device has room for 27"):
        mix_sweep.exchange(1, 7168, torch.device("cpu"))
