"""Proves: SFT learns, and one that was interrupted at any step ends with the same weights as one that was not; a loss
that is not finite and a tensor outside its format stop it by name.

One process. Not here: the command line around it (tests/e2e).
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollforward.model.errors import NonFiniteLossError
from rollforward.model.precision import PackedTensor
from rollforward.model.published import PublishedWeights
from rollforward.model.scoring import ScoringBatch
from rollforward.model.trainer import LossFunction, StepResult, Trainer
from rollforward.rl import sft
from rollforward.rl.config import SFTRun
from rollforward.rl.conversations import ConversationSource, PackedConversations
from rollforward.rl.errors import ModelDirectoryError, QuantisationError, TaskError
from rollforward.rl.prompts import DataCursor
from rollforward.rl.setup import load_parts
from rollforward.rl.sft import SFTLoop, conversations_of
from rollforward.rl.tracker import Tracker
from rollforward.rollout.types import FailureType
from rollforward.rollout.weights import read_published
from tests.helpers.ranks import join_alone
from tests.helpers.runs import TASK, write_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def _run(run_dir: Path, model_dir: Path, **changes: Any) -> SFTRun:
    values: dict[str, Any] = {
        "run_dir": str(run_dir),
        "start": {"type": "checkpoint", "model_dir": str(model_dir)},
        "tasks": [TASK],
        "optim": {"type": "adamw", "lr": 2e-3, "warmup_steps": 2},
        "steps": 6,
        "micro_batch_tokens": 96,
        "micro_batches_per_step": 2,
        "max_prompt_tokens": 40,
        "max_answer_tokens": 8,
        "eval": {"prompts": 4, "every_steps": 6},
        "checkpoint_every_steps": 2,
        "tracker": {"mode": "disabled"},
        "rollout": {"threads": 1, "wal": {"level": "process"}},
    }
    return msgspec.convert(values | changes, SFTRun)


def _loop(run_dir: Path, model_dir: Path, **changes: Any) -> SFTLoop:
    run = _run(run_dir, model_dir, **changes)
    run_dir.mkdir(parents=True, exist_ok=True)
    join_alone(run_dir)
    parts = load_parts(
        model_dir, run.tasks, max_prompt_tokens=run.max_prompt_tokens, max_new_tokens=8, sandbox=run.sandbox
    )
    return SFTLoop(run, parts, conversations_of(run, parts), model_dir, Tracker(run_dir, run.tracker, run_config={}))


def test_conversations_are_looked_at_before_the_weights_are_read(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("minutes, of a large model")

    monkeypatch.setattr(sft, "read_checkpoint", never)
    rows = [{"question": f"{n} + 1", "answer": "9" * (200 if n % 3 == 0 else 1)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {"type": "dataset", "name": "mine", "path": str(tmp_path / "rows.jsonl"), "reward": {"type": "math_verify"}}
    run = _run(tmp_path / "run", model_dir, tasks=[task | {"heldout_size": 4}], micro_batch_tokens=512)
    with pytest.raises(TaskError, match=r"task mine: conversation \d+ has \d+ answer tokens, more than max_answer_tok"):
        sft.main(run)
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "the tracker has not begun either"


def test_errors_name_settings_as_this_verb_calls_them(model_dir: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(ModelDirectoryError, match=rf"^start\.model_dir is {absent}, .* Set start\.model_dir=DIR$"):
        sft.main(_run(tmp_path / "run", absent))
    with pytest.raises(ModelDirectoryError, match=r"Lower max_prompt_tokens or max_answer_tokens$"):
        sft.main(_run(tmp_path / "run", model_dir, max_answer_tokens=10**6, micro_batch_tokens=2 * 10**6))


def _losses(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["sft/loss"] for line in lines}


@pytest.fixture(scope="module")
def undisturbed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("sft") / "run"
    _loop(run_dir, model_dir).run()
    return run_dir


def test_the_loss_falls(undisturbed: Path) -> None:
    losses = _losses(undisturbed)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert losses[6] < 0.8 * losses[1]


def test_an_evaluation_without_one_verdict_is_told_and_the_run_goes_on(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An untrained model judges: none of its verdicts can be read, which says nothing about the answers."""
    rubric = {"type": "rubric", "criteria": [{"name": "even", "text": "It is even."}], "max_verdict_tokens": 4}
    task = {"type": "dataset", "name": "evens", "path": {"type": "evens", "rows": 40}, "heldout_size": 10}
    settings: dict[str, Any] = {
        "tasks": [TASK, task | {"reward": rubric}],
        "optim": {"type": "adamw", "lr": 1e-9},  # any token is as likely as any other, so hardly an answer is empty
        "eval": {"prompts": 4, "every_steps": 1, "temperature": 1.0},
        "steps": 2,
    }
    _, accuracy = _loop(tmp_path / "run", model_dir, **settings).run()
    assert (accuracy.accuracy, accuracy.judged, accuracy.unscored) == (None, 0, {FailureType.INFRA: 4})
    assert accuracy.calibrations[0].problems
    assert (
        "evaluation after step 1: task evens has no accuracy, since not one of its answers could be judged (infra 4)"
    ) in capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert "val-core/evens/acc/mean@1" not in lines[-1]
    assert lines[-1]["val-aux/evens/failure/infra/rate"] == 1.0
    # The other task has its accuracy.
    assert lines[-1]["val-core/chain_sum/acc/mean@1"] < 1.0
    assert lines[-1]["val-aux/chain_sum/failure/infra/rate"] == 0.0
    assert (tmp_path / "run" / "model").is_dir()


class _KilledError(Exception):
    """The process ended here."""


@pytest.mark.parametrize("dies_at", [1, 3, 4, 6])
def test_an_interrupted_run_ends_with_the_same_weights(
    undisturbed: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    step, left = Trainer.train_step, [dies_at]

    def dying(
        self: Trainer, batches: Sequence[ScoringBatch], loss: LossFunction, *, temperature: float = 1.0
    ) -> StepResult:
        left[0] -= 1
        if left[0] == 0:
            raise _KilledError
        return step(self, batches, loss, temperature=temperature)

    monkeypatch.setattr(Trainer, "train_step", dying)
    with pytest.raises(_KilledError):
        _loop(tmp_path / "run", model_dir).run()
    monkeypatch.undo()
    _loop(tmp_path / "run", model_dir).run()
    assert read_published(tmp_path / "run" / "model")[0] == read_published(undisturbed / "model")[0]
    assert _losses(tmp_path / "run") == _losses(undisturbed)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_stops_before_the_step_and_names_the_conversations(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """The third conversation of the second micro-batch of the third step has an impossible weight."""
    draw = ConversationSource.draw
    spoiled: list[PackedConversations] = []

    def spoiling(
        self: ConversationSource, cursor: DataCursor, num_batches: int
    ) -> tuple[tuple[PackedConversations, ...], DataCursor]:
        batches, after = draw(self, cursor, num_batches)
        if len(spoiled) == 2:
            last = batches[1]
            start, end = np.cumsum(last.sequence_lengths_B)[1:3]
            weight_T = last.token_weight_T.copy()
            weight_T[start + int(np.flatnonzero(last.trained_mask_T[start:end])[0])] = value
            batches = (batches[0], msgspec.structs.replace(last, token_weight_T=weight_T))
        spoiled.append(batches[1])
        return batches, after

    monkeypatch.setattr(ConversationSource, "draw", spoiling)
    loop = _loop(tmp_path / "run", model_dir)
    with pytest.raises(NonFiniteLossError) as caught:
        loop.run()
    other = r"chain_sum conversation \d+ \(\S+\)"
    message = (
        r"step 2, micro-batch 2 of 2: the loss is (nan|inf); it must be finite\."
        rf" Worst sequences: {re.escape(str(spoiled[2].ids[2]))} \((nan|inf)\), {other}, {other}\. "
        r"Nothing was updated\. "
    )
    assert re.match(message, str(caught.value)), str(caught.value)
    assert loop._trainer.num_steps == 2
    assert sorted(_losses(tmp_path / "run")) == [1, 2]


def test_a_trainer_that_leaves_a_tensor_out_of_its_format_stops_before_the_first_step(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = PublishedWeights.pack

    def leaving_one_out(self: PublishedWeights, name: str, master: torch.Tensor) -> PackedTensor:
        if name == "head.weight":
            return PackedTensor(format="fp32", data=master, scale=None)
        return pack(self, name, master)

    monkeypatch.setattr(PublishedWeights, "pack", leaving_one_out)
    with pytest.raises(QuantisationError, match=r"^rank 0 takes \d+ tensors through bf16, planned are \d+ "):
        _loop(tmp_path / "run", model_dir)
