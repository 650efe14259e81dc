"""A small run without Ray: real tasks, tokenizer, learner, replicas and log, in one process.

An untrained model answers nothing right, so rewards here are a hash of the text (`HashScored`): they differ within a
group, and weights move.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollforward.model.checkpoint import read_checkpoint, write_checkpoint
from rollforward.model.config import load_model_config, preset
from rollforward.model.init import fresh_params
from rollforward.model.tokenizer import DSML, Tokenizer, TokenizerConfig, train_tokenizer
from rollforward.rl.config import RLRun
from rollforward.rl.controller import Controller
from rollforward.rl.conversations import tokenizer_texts
from rollforward.rl.judge.seats import Judges, local_engines
from rollforward.rl.learner import Learner, LearnerSettings
from rollforward.rl.setup import load_parts
from rollforward.rl.stages import PolicyGradientStages
from rollforward.rl.tasks.registry import build_tasks
from rollforward.rl.tasks.types import Example, Score, ScoreReason, Task
from rollforward.rl.tracker import Tracker
from rollforward.rollout.replica import LogStats, Replica
from rollforward.rollout.router import merge_completions, split_requests
from rollforward.rollout.types import Completion, Request
from rollforward.rollout.wal_retention import Retirement
from rollforward.rollout.wal_scan import Problem
from rollforward.rollout.weights import WeightsAck
from rollforward.rollout.workspace import Submission
from tests.helpers.ranks import join_alone

TASK = {
    "type": "reasoning_gym",
    "name": "chain_sum",
    "dataset": "chain_sum",
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "partial_credit": False,
    "train_size": 500,
    "heldout_size": 12,
}


def small_run(run_dir: Path, model_dir: Path, **changes: Any) -> RLRun:
    """A run of 3 steps with 4 prompts of 2 members."""
    values: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model_dir": str(model_dir),
        "tasks": [TASK],
        "algo": {"type": "grpo", "group_size": 2},
        "optim": {"type": "adamw", "lr": 1e-3},
        "sampling": {"max_new_tokens": 6},
        "steps": 3,
        "prompts_per_step": 4,
        "micro_batch_tokens": 128,
        "max_prompt_tokens": 40,
        "eval": {"prompts": 4, "every_steps": 3},
        "checkpoint_every_steps": 1,
        "tracker": {"mode": "disabled"},
        "rollout": {"threads": 1, "wal": {"level": "process"}},
        "cluster": {"learner_threads": 1},
    }
    return msgspec.convert(values | changes, RLRun)


def write_model(directory: Path, *, seed: int = 0, vocab_size: int = 384) -> Path:
    """A fresh tiny model with a tokenizer for TASK."""
    run = small_run(directory, directory)
    texts = tokenizer_texts(build_tasks(run.tasks), 200)
    tokenizer = train_tokenizer(texts, TokenizerConfig(vocab_size=vocab_size))
    config = msgspec.structs.replace(preset("tiny"), vocab_size=tokenizer.vocab_size)
    files = {"tokenizer.json": tokenizer.serialized.encode()}
    write_checkpoint(directory, config, fresh_params(config, seed=seed), precision="fp32", extra_files=files)
    return directory


def write_calling_model(directory: Path) -> Path:
    """The same, in a directory beside, with ends of turns and the marker of calls standing out among the tokens: turns
    end, and most of them call, malformed."""
    plain = write_model(directory)
    tokenizer, config = Tokenizer.load(plain), load_model_config(plain / "config.json")
    params = dict(read_checkpoint(plain, config))
    params["head.weight"] = params["head.weight"].clone()
    params["head.weight"][[tokenizer.eos_id, tokenizer.control_id(DSML)]] *= 20
    calling = plain.with_name("calling")
    files = {"tokenizer.json": tokenizer.serialized.encode()}
    write_checkpoint(calling, config, params, precision="fp32", extra_files=files)
    return calling


class HashScored:
    """A task whose rewards are a hash of the text, in quarters from 0 to 1."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def score(self, example: Example, text: str, submission: Submission | None = None) -> Score:
        value = hashlib.blake2b(text.encode()).digest()[0] % 5 / 4
        return Score(value=value, reason=ScoreReason.CORRECT if value == 1 else ScoreReason.PARTIAL)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


class LocalRollout:
    """Replicas in this process behind the interface of the pool."""

    def __init__(self, replicas: Sequence[Replica], judges: Judges | None = None) -> None:
        self.replicas = list(replicas)
        self.judges = judges
        self.num_requests = 0

    def load_weights(self, directory: Path) -> list[WeightsAck]:
        return [replica.load_weights(directory) for replica in self.replicas]

    def acknowledge(self) -> list[WeightsAck]:
        return [replica.acknowledge() for replica in self.replicas]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.num_requests += len(requests)
        shares = split_requests(requests, len(self.replicas))
        answers = [replica.generate(share) for replica, share in zip(self.replicas, shares, strict=True)]
        return merge_completions(requests, answers)

    def log_problems(self) -> list[Problem]:
        return [problem for replica in self.replicas for problem in replica.log_problems()]

    def log_stats(self) -> list[LogStats]:
        return [replica.log_stats() for replica in self.replicas]

    def retire(self, before_step: int) -> list[Retirement]:
        return [replica.retire(before_step) for replica in self.replicas]

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()
        if self.judges is not None:
            self.judges.close()


def build_controller(run: RLRun, *, hash_scored: bool = True) -> tuple[Controller, Learner, LocalRollout]:
    """Everything of one process of the run, as rl/train.py places it on Ray; without `hash_scored` with its own
    rewards, and its judges."""
    run_dir = Path(run.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    join_alone(run_dir)
    parts = load_parts(
        Path(run.model_dir),
        run.tasks,
        max_prompt_tokens=run.max_prompt_tokens,
        max_new_tokens=run.sampling.max_new_tokens,
        sandbox=run.sandbox,
    )
    settings = LearnerSettings(
        model_dir=run.model_dir,
        algorithm=run.algo,
        optim=run.optim,
        precision=run.precision,
        temperature=run.sampling.temperature,
        threads=1,
        kernels=run.kernels,
        balance=run.balance,
        recompute=run.recompute,
        seed=run.seed,
    )
    learner = Learner(settings)
    replicas = [
        Replica(
            f"engine-{index}",
            run_dir / "wal" / f"engine-{index}",
            parts.model_config,
            precision=run.precision,
            config=run.rollout,
            environment=parts.environment,
        )
        for index in range(run.rollout.engines)
    ]
    judges = Judges(
        parts.judges,
        [local_engines(model, run_dir, run.rollout) for model in parts.judges],
        run_dir=run_dir,
        run_seed=run.seed,
    )
    judges.open()
    rollout = LocalRollout(replicas, judges)
    tracker = Tracker(run_dir, run.tracker, run_config={})
    tasks: list[Any] = [HashScored(task) if hash_scored else task for task in parts.tasks]
    controller = Controller(
        run,
        stages=PolicyGradientStages(run, learner),
        tasks=tasks,
        encoder=parts.encoder,
        rollout=rollout,
        learner=learner,
        tracker=tracker,
        judges=judges,
        judging=judges.judging(rollout.generate, parts.encoding, parts.model_config),
    )
    return controller, learner, rollout
