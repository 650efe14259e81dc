"""Proves: before its first step a run finds out whether teachers compute what the student computes: a weight with one
flipped bit, vectors of another row, another model's head, layers in another order, or a loss that is not 0 where it
must be, each end it; the path as it is passes and leaves nothing behind.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollforward.distill import learner, teachers
from rollforward.distill.errors import CanaryError, TeacherReadError
from rollforward.distill.hidden_cache import HIDDEN_NAME, HiddenCache
from rollforward.distill.learner import DistillLearner
from rollforward.distill.stages import DistillStages
from rollforward.distill.teacher_source import TeacherSource
from rollforward.distill.teacher_weights import _PassingBlocks
from rollforward.rollout.weights import canary_ids, version_directory
from tests.helpers.distill_runs import LocalPool, build_distill, learner_settings, small_distill, write_models
from tests.helpers.ranks import join_alone


class _Student:
    """A learner at the start of a run, and the version that it published."""

    def __init__(self, root: Path) -> None:
        write_models(root, "student", "a")
        teacher = {"a": {"model_dir": str(root / "a")}}
        self.run = small_distill(root / "run", root / "student", teacher, routing="all")
        join_alone(root)
        settings = learner_settings(self.run)
        self.learner = DistillLearner(settings)
        self.learner.publish(root / "weights", 0)
        self.published = version_directory(root / "weights", 0)
        self.other = root / "a"
        self._stages = DistillStages(self.run, LocalPool(self.learner), settings.teachers)

    def begin(self, directory: Path) -> None:
        self._stages.begin(directory)

    def require_refused(self, directory: Path) -> None:
        said = r"rank 0: with the student as its own teacher .* must be exactly 0\..* Nothing was trained"
        with pytest.raises(CanaryError, match=said):
            self.begin(directory)
        self.require_nothing_left()

    def require_nothing_left(self) -> None:
        root = Path(self.run.run_dir) / HIDDEN_NAME
        assert not root.exists() or list(root.iterdir()) == []


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> _Student:
    return _Student(tmp_path_factory.mktemp("canary"))


def test_the_path_as_it_is_passes_and_leaves_nothing_behind(
    student: _Student, capsys: pytest.CaptureFixture[str]
) -> None:
    student.begin(student.published)
    assert "canary: the student as its own teacher has KL 0 and gradient 0" in capsys.readouterr().err
    student.require_nothing_left()
    (found,) = LocalPool(student.learner).canary(student.published)
    assert (found.kl_max, found.gradient_max) == (0.0, 0.0)
    assert found.num_rows > student.learner.model_config.sliding_window


def test_another_model_is_not_the_student(student: _Student) -> None:
    student.require_refused(student.other)


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "layers.0.attn.wq_a.weight",
        "layers.0.ffn.experts.3.w2.weight",
        "layers.1.hc_ffn_fn",
        "layers.2.attn.compressor.wkv.weight",
        "layers.3.ffn.gate.weight",
        "hc_head_fn",
        "norm.weight",
        "head.weight",
    ],
)
def test_one_flipped_bit_of_a_weight_is_found(student: _Student, tmp_path: Path, name: str) -> None:
    """In a copy of what was published: the sign of the largest value, in every format that a model has."""
    copy = shutil.copytree(student.published, tmp_path / "copy")
    (file,) = [file for file in copy.glob("*.safetensors") if name in load_file(file)]
    tensors = load_file(file)
    value = tensors[name]
    if name == "embed.weight":  # a row that the canary's text reads
        value = value[canary_ids(student.learner.model_config)[0]]
    is_packed = value.dtype == torch.int8  # two codes of MXFP4 in a byte, the first in its low bits
    size = (value & 7 if is_packed else value.float()).abs().flatten()
    last_byte = (int(size.argmax()) + 1) * value.itemsize - 1
    value.view(torch.uint8).view(-1)[last_byte] ^= 0x08 if is_packed else 0x80
    save_file(tensors, file)
    student.require_refused(copy)


def _patched_score(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """What a teacher says of a micro-batch, changed."""
    scored = teachers._scored

    def changed(*args: Any) -> tuple[Tensor, Tensor]:
        return change(*scored(*args))

    return changed


def test_vectors_of_the_row_before_are_found(student: _Student, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "_scored", _patched_score(lambda hidden_RE, said_R: (hidden_RE.roll(1, 0), said_R)))
    student.require_refused(student.published)


def test_one_vector_that_differs_in_the_last_digit_of_one_number_is_found(
    student: _Student, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nudged(hidden_RE: Tensor, said_R: Tensor) -> tuple[Tensor, Tensor]:
        hidden_RE = hidden_RE.clone()
        column = int(hidden_RE[7].abs().argmax())
        hidden_RE[7, column] *= 1 + 2**-7
        return hidden_RE.bfloat16().float(), said_R

    monkeypatch.setattr(teachers, "_scored", _patched_score(nudged))
    student.require_refused(student.published)


def test_the_head_of_another_model_is_found(student: _Student, monkeypatch: pytest.MonkeyPatch) -> None:
    read = teachers.read_head

    def of_another(source: TeacherSource, **options: Any) -> Tensor:
        return read(msgspec.structs.replace(source, directory=student.other), **options)

    monkeypatch.setattr(teachers, "read_head", of_another)
    student.require_refused(student.published)


def test_layers_in_another_order_are_found(student: _Student, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and the fourth are of one kind, so that nothing else would notice."""
    config = student.learner.model_config
    assert config.layer_kind(1) == config.layer_kind(3)
    in_order = _PassingBlocks.__getitem__

    def exchanged(blocks: _PassingBlocks, index: int) -> Any:
        return in_order(blocks, {1: 3, 3: 1}.get(index, index))

    monkeypatch.setattr(_PassingBlocks, "__getitem__", exchanged)
    student.require_refused(student.published)


@pytest.mark.parametrize("factor", [1e-20, float("nan")])
def test_a_gradient_of_the_head_alone_is_found(
    student: _Student, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    """Whatever the value of the loss says."""
    exact = learner.reverse_kl

    def with_gradient(hidden_RD: Tensor, head_VD: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        loss, kl_R = exact(hidden_RD, head_VD, *others)
        return loss + factor * head_VD[5, 3], kl_R

    monkeypatch.setattr(learner, "reverse_kl", with_gradient)
    student.require_refused(student.published)


def test_a_canary_that_was_killed_leaves_nothing_to_those_who_come_after(student: _Student) -> None:
    """Of more ranks than there are now, too."""
    root = Path(student.run.run_dir) / HIDDEN_NAME
    for rank in (0, 3):
        left = HiddenCache(root / f"canary-{rank}", max_bytes=1).path(0, 0, "student")
        left.parent.mkdir(parents=True)
        left.write_bytes(b"half")
    student.begin(student.published)
    student.require_nothing_left()


def test_a_version_that_cannot_be_read_ends_the_run_too(student: _Student, tmp_path: Path) -> None:
    copy = shutil.copytree(student.published, tmp_path / "copy")
    (copy / "config.json").unlink()
    with pytest.raises(TeacherReadError, match="teacher student: "):
        student.begin(copy)
    student.require_nothing_left()


def test_every_process_of_a_run_has_its_canary_before_its_first_step(
    student: _Student, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = msgspec.structs.replace(student.run, run_dir=str(tmp_path / "run"))
    controller, _, rollout = build_distill(run)
    monkeypatch.setattr(teachers, "_scored", _patched_score(lambda hidden_RE, said_R: (hidden_RE.roll(1, 0), said_R)))
    with pytest.raises(CanaryError):
        controller.run()
    rollout.close()
    assert rollout.num_requests == 0, "nothing is sampled, not even for an evaluation"
