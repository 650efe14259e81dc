"""The loop of reinforcement learning and of distillation. One synchronous step:

    PromptSource --examples--> group_requests --requests--> rollout.generate ----completions--+
         ^ cursor                                               ^                              v
         |                                                      | weights vK            score_completions
     checkpoint <-- state --+                                   |                              | scores
                            |                          publish, acknowledge                    v
                            +-- stages.learn <--files, batch-- write_step <-- stages.batch <-- build_groups

With dynamic sampling the upper row runs again for the groups that teach nothing (`refill.py`). `stages` is the only
difference between kinds of run: that of `train` is in `stages.py`, that of `distill` in `distill/stages.py`.

| stage    | consumes                          | produces                      | waits for                        |
|----------|-----------------------------------|-------------------------------|----------------------------------|
| rollout  | prompts, weights vK               | completions, durable          | every replica's acknowledgement  |
| score    | completions, tasks                | rewards                       | all completions of the step      |
| learn    | samples/step_K, its batch         | masters, step K + 1           | all rewards of the step          |
| publish  | masters                           | weights v(K+1) with manifest  | nothing in flight                |

Weights are published only when nothing is in flight, and version K is the policy after K optimizer steps, so a run
that was interrupted and one that was not do the same thing: what the log holds is answered from the log, the rest is
drawn again to the same bits. Here: the order of stages, without Ray. The stages themselves are one call each, one file
away.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from rollforward.conf.console import Progress, say
from rollforward.conf.errors import RunDirError
from rollforward.model.metrics import Metric, metric_values
from rollforward.rl.answers import Answer, sampled_answers
from rollforward.rl.bias_metrics import bias_of_step
from rollforward.rl.checkpoints import (
    CHECKPOINTS_NAME,
    LoopState,
    is_due,
    log_positions,
    name_lost_logs,
    oldest_step,
    restore,
    save_checkpoint,
)
from rollforward.rl.config import LoopRun
from rollforward.rl.errors import NoTrainableTrajectoriesError, ProbabilityMismatchError
from rollforward.rl.evaluation import Evaluator, TaskAccuracy, accuracy_values
from rollforward.rl.judge.judging import Judging
from rollforward.rl.judge.metrics import judge_metrics, reward_metrics
from rollforward.rl.judge.seats import Judges
from rollforward.rl.metrics import (
    describe_mute_tools,
    group_metrics,
    log_metrics,
    pool_metrics,
    sync_metrics,
    turn_metrics,
)
from rollforward.rl.prompts import PromptSource
from rollforward.rl.refill import Sampled, StepGroups, check_infra, sample_groups
from rollforward.rl.samples import SAMPLES_NAME, remove_steps, write_step
from rollforward.rl.sampling import (
    PromptEncoder,
    build_groups,
    describe_unscored,
    group_requests,
    read_turns,
    score_completions,
    shuffle_rewards,
)
from rollforward.rl.stages import Stages
from rollforward.rl.tasks.types import Task
from rollforward.rl.tracker import Tracker
from rollforward.rollout.agent_retention import retire_commands
from rollforward.rollout.replica import LogStats
from rollforward.rollout.types import Completion, Request
from rollforward.rollout.wal_retention import Retirement
from rollforward.rollout.wal_scan import Problem
from rollforward.rollout.weights import (
    WEIGHTS_NAME,
    WeightsAck,
    WeightsManifest,
    check_acknowledgement,
    version_directory,
)
from rollforward.sandbox.types import PoolStats


class Rollout(Protocol):
    """The rollout side as the loop sees it."""

    def load_weights(self, directory: Path) -> list[WeightsAck]:
        """Load a published version on every replica and return what each one holds."""
        ...

    def acknowledge(self) -> list[WeightsAck]:
        """Return what every replica holds now, hashed anew."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample requests to their end, in order; every token is durable."""
        ...

    def log_problems(self) -> list[Problem]:
        """Return what was wrong with the replicas' logs when they were opened."""
        ...

    def log_stats(self) -> list[LogStats]:
        """Return every replica's log counters."""
        ...

    def retire(self, before_step: int) -> list[Retirement]:
        """Let every replica's log forget requests of earlier steps, as far as it is larger than it may be."""
        ...


class LearnerGroup(Protocol):
    """The learner side as the loop sees it."""

    def publish(self, root: Path, policy_version: int) -> WeightsManifest:
        """Write the current policy as a version."""
        ...

    def save(self, directory: Path) -> None:
        """Write learner state into a checkpoint's directory."""
        ...

    def load(self, directory: Path) -> None:
        """Take learner state from a checkpoint's directory."""
        ...


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run achieved."""

    before: tuple[TaskAccuracy, ...]
    """Held-out accuracy of the model that the run started from."""
    after: tuple[TaskAccuracy, ...]
    """Held-out accuracy at the end."""
    steps: int
    """Optimizer steps of the whole run."""
    trained_tokens: int
    """Sampled tokens that the whole run trained on."""
    rollout_probs_diff_max: float
    """Largest difference between a token's probability in the engine and in training, over the whole run."""


class Controller:
    """Runs the loop of one run directory, from its newest checkpoint if there is one."""

    def __init__(
        self,
        run: LoopRun,
        *,
        stages: Stages,
        tasks: Sequence[Task],
        encoder: PromptEncoder,
        rollout: Rollout,
        learner: LearnerGroup,
        tracker: Tracker,
        pool: Callable[[], PoolStats] | None = None,
        judges: Judges | None = None,
        judging: Judging | None = None,
    ) -> None:
        """Bind the parts of one run.

        Args:
            run: the configuration.
            stages: what the kind of run brings along.
            tasks, encoder: what is asked, and how it becomes tokens.
            rollout, learner: the two sides.
            tracker: where metrics go.
            pool: tells what the supervisors of sandboxes counted; None where there are none.
            judges: models that judge, with their logs; None where the policy alone does, or nobody.
            judging: asks them and the policy; None where no task has a reward of type rubric.
        """
        self._run = run
        self._stages = stages
        self._pool = pool
        self._judges, self._judging = judges, judging
        self._run_dir = Path(run.run_dir).resolve()
        self._tasks = {task.name: task for task in tasks}
        self._encoder = encoder
        self._prompts = PromptSource(tasks, seed=run.seed)
        self._evaluator = Evaluator(
            tasks,
            encoder,
            num_prompts=run.eval.prompts,
            sampling=msgspec.structs.replace(run.sampling, temperature=run.eval.temperature),
            run_seed=run.seed,
        )
        self._rollout = rollout
        self._learner = learner
        self._tracker = tracker
        self._seconds: dict[str, float] = {}
        self._manifest: WeightsManifest | None = None
        self._sync_metrics: tuple[Metric, ...] = ()

    def run(self) -> RunOutcome:
        """Do what is left of the run and return its outcome.

        Raises:
            WeightsError: a replica does not hold what was published.
            ProbabilityMismatchError: training and sampling disagree although every replica does.
            InfraFailureError: the platform failed too many of a step's completions.
            NonFiniteLossError, NoTrainableTrajectoriesError: the step cannot be trained; nothing was updated.
        """
        judged = [] if self._judges is None else self._judges.log_problems()
        for problem in (*self._rollout.log_problems(), *judged):
            failed = f"; damaged: {', '.join(map(str, problem.requests))}" if problem.requests else ""
            say(f"token log, {problem.where}: {problem.kind}: {problem.detail}{failed}")
        state = self._restore()
        self._publish(state.step)
        self._stages.begin(version_directory(self._run_dir / WEIGHTS_NAME, state.step))
        before = self._evaluate(0) if state.step == 0 else self._recall_evaluation(0)
        for one in before:
            say(f"{one.task} accuracy before the first step {one.shown} ({one.correct} of {one.judged} held-out)")
        # The last step is always evaluated, before its checkpoint.
        after = self._recall_evaluation(state.step) if state.step == self._run.steps else before
        self._seconds = {}
        start_s = time.monotonic()
        with Progress("train", self._run.steps, done=state.step) as progress:
            while state.step < self._run.steps:
                state, values, answers = self._step(state)
                if self._is_due(state.step, self._run.eval.every_steps):
                    after = self._evaluate(state.step)
                    values |= accuracy_values(after)
                values |= {f"timing_s/{stage}": seconds for stage, seconds in self._seconds.items()}
                values["timing_s/step"] = time.monotonic() - start_s
                # Logged before the checkpoint: a step that a killed run repeats stands twice, none is missing. The
                # time of the checkpoint is in the next step's line.
                self._tracker.log(state.step, values, answers)
                progress.step(_shown(values))
                self._seconds = {}
                start_s = time.monotonic()
                if self._is_due(state.step, self._run.checkpoint_every_steps):
                    self._save(state)
        return RunOutcome(
            before=before,
            after=after,
            steps=state.step,
            trained_tokens=state.trained_tokens,
            rollout_probs_diff_max=state.probs_diff_max,
        )

    def _step(self, state: LoopState) -> tuple[LoopState, dict[str, float], tuple[Answer, ...]]:
        """One optimizer step: sample, score, learn, publish. Also the answers that are to be shown, if any."""
        run = self._run
        step_groups = self._sample(state)
        sampled = step_groups.sampled
        try:
            batch = self._stages.batch(step_groups.trained)
        except NoTrainableTrajectoriesError as error:
            said = [f"step {state.step + 1}", describe_unscored(sampled.scores), str(error)]
            raise NoTrainableTrajectoriesError(": ".join(filter(None, said))) from error
        with self._timed("write_samples"):
            step_dir = write_step(self._run_dir / SAMPLES_NAME, state.step, batch)
        metrics = self._stages.learn(step_dir, batch, self._timed)
        logs = self._log_stats()
        bias = bias_of_step(sampled.groups, logs, state.length_bias, alarm_z=run.rollout.bias_alarm_z)
        if bias.alarm is not None:
            say(f"step {state.step + 1}: {bias.alarm}")
        for said in describe_mute_tools(logs):
            say(f"step {state.step + 1}: {said}")
        turns = turn_metrics(list(sampled.turns.values()))
        pool = () if self._pool is None else pool_metrics(self._pool())
        counters = (*log_metrics(logs), *bias.metrics, *pool)
        values = metric_values((*batch.metrics, *step_groups.metrics, *turns, *sampled.metrics, *metrics, *counters))
        # Rewards, lengths and failures are the policy's, so over all that it sampled; the batch knows what is trained.
        values |= metric_values(group_metrics(sampled.groups))
        self._require_equal_probs(state.step, values["training/rollout_probs_diff_max"])
        with self._timed("update_weights"):
            self._publish(state.step + 1)
        values |= metric_values(self._sync_metrics)
        values["perf/total_num_tokens"] = float(sum(row.num_tokens for row in batch.rows))
        after = LoopState(
            step=state.step + 1,
            cursor=sampled.cursor,
            trained_tokens=state.trained_tokens + batch.num_trained_tokens,
            probs_diff_max=max(state.probs_diff_max, values["training/rollout_probs_diff_max"]),
            length_bias=bias.totals,
        )
        shows = self._is_due(after.step, run.tracker.answers_every_steps or run.eval.every_steps)
        answers = sampled_answers(batch.rows, sampled.examples, sampled.completions, self._encoder) if shows else ()
        return after, values, answers

    def _sample(self, state: LoopState) -> StepGroups:
        """All draws of one step, and which groups it trains on."""
        found = sample_groups(
            lambda sampled, num_prompts: self._draw_more(state.step, sampled, num_prompts),
            state.cursor,
            num_prompts=self._run.prompts_per_step,
            dynamic=self._stages.rules.dynamic_sampling,
            truncation=self._stages.rules.truncation,
        )
        if found.warning is not None:
            say(f"step {state.step + 1}: {found.warning}")
        check_infra(found.sampled, step=state.step, max_share=self._run.rollout.max_infra_share)
        return found

    def _draw_more(self, step: int, sampled: Sampled, num_prompts: int) -> Sampled:
        """Sample and score as many further prompts for a step."""
        run, rules = self._run, self._stages.rules
        drawn, cursor = self._prompts.draw(sampled.cursor, num_prompts)
        requests = group_requests(
            drawn,
            self._encoder,
            self._tasks,
            step=step,
            group_size=rules.group_size,
            run_seed=run.seed,
            sampling=run.sampling,
            policy_version=step,
            first_prompt=len(sampled.examples),
            record_routes=rules.record_routes,
        )
        examples = (*sampled.examples, *drawn)
        with self._timed("gen"):
            completions = self._rollout.generate(requests)
        with self._timed("reward"):
            scores = score_completions(
                examples, completions, self._encoder, self._tasks, judging=self._judging, policy_version=step
            )
        if (unscored := describe_unscored(scores)) is not None:
            say(f"step {step + 1}: {unscored}")
        turns = read_turns(examples, completions, self._encoder)
        groups = build_groups(examples, requests, completions, scores, self._tasks, turns)
        if rules.shuffle_rewards:
            groups = shuffle_rewards(groups, run_seed=run.seed)
        return Sampled(
            cursor=cursor,
            num_draws=sampled.num_draws + 1,
            examples=examples,
            completions=(*sampled.completions, *completions),
            turns=sampled.turns | turns,
            groups=(*sampled.groups, *groups),
            metrics=(*sampled.metrics, *reward_metrics(scores), *judge_metrics(scores)),
            scores=(*sampled.scores, *scores),
        )

    def _require_equal_probs(self, step: int, probs_diff_max: float) -> None:
        """Stop where training and sampling disagree: each token of the step was drawn by the policy that is trained."""
        if probs_diff_max == 0.0:
            return
        if self._manifest is not None:
            for ack in self._rollout.acknowledge():
                check_acknowledgement(self._manifest, ack)
        raise ProbabilityMismatchError(
            f"step {step + 1}: training/rollout_probs_diff_max is {probs_diff_max}; on-policy it must be exactly 0."
            " The replicas hold the published weights, so a forward pass is not reproducible on this machine: check"
            " that engines and learner run on one machine type. The token log keeps what was drawn; begin anew in"
            " another run_dir"
        )

    def _publish(self, policy_version: int) -> None:
        """Publish the learner's weights; the gate opens where every replica proves that it holds them."""
        root = self._run_dir / WEIGHTS_NAME
        start_s = time.monotonic()
        before, self._manifest = self._manifest, self._learner.publish(root, policy_version)
        publish_s = time.monotonic() - start_s
        acks = self._rollout.load_weights(version_directory(root, policy_version))
        for ack in acks:
            check_acknowledgement(self._manifest, ack)
        self._sync_metrics = sync_metrics(before, self._manifest, acks, publish_s=publish_s)

    def _evaluate(self, step: int) -> tuple[TaskAccuracy, ...]:
        with self._timed("testing"):
            results = self._evaluator.evaluate(
                self._rollout.generate, step=step, policy_version=step, judging=self._judging
            )
        self._evaluation_file(step).write_bytes(msgspec.json.format(msgspec.json.encode(results)))
        return results

    def _recall_evaluation(self, step: int) -> tuple[TaskAccuracy, ...]:
        """The evaluation after ``step`` steps, as an earlier process of the run wrote it."""
        file = self._evaluation_file(step)
        try:
            return msgspec.json.decode(file.read_bytes(), type=tuple[TaskAccuracy, ...])
        except (OSError, msgspec.MsgspecError) as error:
            raise RunDirError(
                f"{file}, which an earlier process of this run wrote, cannot be read: {error}. Put it back, or remove"
                f" {self._run_dir / CHECKPOINTS_NAME} to begin the run again"
            ) from error

    def _evaluation_file(self, step: int) -> Path:
        return self._run_dir / evaluation_name(step)

    def _restore(self) -> LoopState:
        start = LoopState(step=0, cursor=self._prompts.start())
        state = restore(self._run_dir / CHECKPOINTS_NAME, self._learner.load, start)
        name_lost_logs(state, self._log_stats())
        self._tracker.begin(state.tracker)
        self._retire_samples(state)
        return state

    def _save(self, state: LoopState) -> None:
        with self._timed("save_checkpoint"):
            root = self._run_dir / CHECKPOINTS_NAME
            logged = log_positions(self._log_stats())
            state = msgspec.structs.replace(state, tracker=self._tracker.state, log_positions=logged)
            save_checkpoint(root, state, self._learner.save, keep=self._run.keep_checkpoints)
            self._retire_samples(state)
            judged = [] if self._judges is None else self._judges.retire(oldest_step(root))
            for retired in (*self._rollout.retire(oldest_step(root)), *judged):
                if retired.kept_because is not None:
                    say(f"a token log does not get smaller: {retired.kept_because}")
            keep_bytes = self._run.sandbox.container.keep_log_bytes
            retire_commands(self._run_dir, oldest_step(root), keep_bytes=keep_bytes)

    def _log_stats(self) -> list[LogStats]:
        """Counters of the replicas' logs, and of the judges'."""
        return [*self._rollout.log_stats(), *([] if self._judges is None else self._judges.log_stats())]

    def _retire_samples(self, state: LoopState) -> None:
        """Unlink what the checkpoint of ``state`` covers; an older one, should it be needed, has the token log."""
        if not self._run.keep_samples:
            remove_steps(self._run_dir / SAMPLES_NAME, before=state.step)

    def _is_due(self, step: int, every_steps: int) -> bool:
        return is_due(step, every_steps, self._run.steps)

    @contextmanager
    def _timed(self, stage: str) -> Generator[None]:
        start_s = time.monotonic()
        yield
        self._seconds[stage] = self._seconds.get(stage, 0.0) + time.monotonic() - start_s


def evaluation_name(step: int) -> str:
    """Name of the file in a run directory with the evaluation after ``step`` steps and some answers."""
    return f"eval_{step:06d}.json"


def _shown(values: dict[str, float]) -> dict[str, object]:
    """The few numbers of a step that a person follows."""
    names = {
        "reward": "critic/rewards/mean",
        "kl": "opd/kl",
        "length": "response_length/mean",
        "entropy": "actor/entropy",
        "probs_diff_max": "training/rollout_probs_diff_max",
    }
    shown: dict[str, object] = {label: values[name] for label, name in names.items() if name in values}
    return shown | {
        f"{name.split('/')[1]} accuracy": value for name, value in values.items() if name.startswith("val-core/")
    }
