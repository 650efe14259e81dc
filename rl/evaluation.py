"""Held-out accuracy: the same questions every time, sampled by an engine, judged by their tasks."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from rollforward.conf import console
from rollforward.rl.judge.calibration import Calibration, calibrate
from rollforward.rl.judge.config import Rubric
from rollforward.rl.judge.judging import Generate, Judging
from rollforward.rl.sampling import PromptEncoder, describe_unscored, group_requests, score_completions
from rollforward.rl.tasks.config import JudgeConfig
from rollforward.rl.tasks.reward_config import RubricReward
from rollforward.rl.tasks.types import Score, Task, Unscored
from rollforward.rollout.types import FailureType, SamplingParams


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One judged answer, for a person to read."""

    task: str
    """Name of the task."""
    question: str
    """Last message of the prompt."""
    text: str
    """What the model said, and between its turns what tools answered."""
    score: float
    """Reward."""
    reason: str
    """Why it got it."""


class TaskAccuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one task."""

    task: str
    """Name of the task."""
    correct: int
    """Answers with full marks."""
    judged: int
    """Answers that were judged; infra and data failures are not among them."""
    unscored: dict[FailureType, int] = {}
    """Answers that were not, by what failed; kinds without any are left out."""
    samples: tuple[Sample, ...]
    """The first few answers."""
    calibrations: tuple[Calibration, ...] = ()
    """How good the judges were, by part of the reward; of a task that trains judging, how good the policy judged. Empty
    where nobody did."""

    @property
    def accuracy(self) -> float | None:
        """Share of judged answers with full marks; None where none could be judged: 0 would be a claim about the
        model."""
        return self.correct / self.judged if self.judged else None

    @property
    def shown(self) -> str:
        """The accuracy for a person."""
        return "unknown" if self.accuracy is None else f"{self.accuracy:.3f}"


class Evaluator:
    """Evaluates one model version after another on the same held-out questions. Immutable."""

    def __init__(
        self,
        tasks: Sequence[Task],
        encoder: PromptEncoder,
        *,
        num_prompts: int,
        sampling: SamplingParams,
        run_seed: int,
    ) -> None:
        """Choose the first ``num_prompts`` held-out questions of every task."""
        self._tasks = {task.name: task for task in tasks}
        self._encoder = encoder
        self._sampling = sampling
        self._run_seed = run_seed
        self._examples = tuple(task.example(index, "heldout") for task in tasks for index in range(num_prompts))

    def evaluate(
        self, generate: Generate, *, step: int, policy_version: int, judging: Judging | None = None
    ) -> tuple[TaskAccuracy, ...]:
        """Answer every question once. A task of which no answer could be judged has no accuracy and is named.

        Args:
            generate: samples the requests.
            step: names the requests; an evaluation of the same step is answered from the log.
            policy_version: weights that must sample them.
            judging: asks models for rewards of type rubric; None where no task has one.
        """
        requests = group_requests(
            self._examples,
            self._encoder,
            self._tasks,
            step=step,
            group_size=1,
            run_seed=self._run_seed,
            sampling=self._sampling,
            policy_version=policy_version,
            is_eval=True,
        )
        completions = generate(requests)
        scores = score_completions(
            self._examples, completions, self._encoder, self._tasks, judging=judging, policy_version=policy_version
        )
        if (unscored := describe_unscored(scores)) is not None:
            console.say(f"evaluation after step {step}: {unscored}")
        results: list[TaskAccuracy] = []
        for name in self._tasks:
            rows = [
                (example, completion, score)
                for example, completion, score in zip(self._examples, completions, scores, strict=True)
                if example.task == name and not isinstance(score, Unscored)
            ]
            samples = tuple(
                Sample(
                    task=name,
                    question=example.messages[-1].content,
                    text=self._encoder.transcript(completion),
                    score=score.value,
                    reason=score.reason,
                )
                for example, completion, score in rows[:5]
            )
            own = [score for example, score in zip(self._examples, scores, strict=True) if example.task == name]
            unscored = Counter(score.failure for score in own if isinstance(score, Unscored))
            if not rows:
                counts = ", ".join(f"{failure} {count}" for failure, count in unscored.items())
                console.say(
                    f"evaluation after step {step}: task {name} has no accuracy, since not one of its answers could be"
                    f" judged ({counts})"
                )
            results.append(
                TaskAccuracy(
                    task=name,
                    correct=sum(score.is_correct for _, _, score in rows),
                    judged=len(rows),
                    unscored=unscored,
                    samples=samples,
                    calibrations=self._calibrations(name, own),
                )
            )
        return tuple(results)

    def _calibrations(self, name: str, scores: Sequence[Score | Unscored]) -> tuple[Calibration, ...]:
        """What a task's scores tell of its judges; answers without a score count too."""
        options = self._tasks[name].options
        rubrics: dict[str, Rubric] = {
            part.name: part.reward for part in options.reward_parts if isinstance(part.reward, RubricReward)
        }
        if isinstance(options, JudgeConfig):
            rubrics[name] = options.rubric
        opinions = [opinion for score in scores for opinion in score.opinions]
        return tuple(
            calibrate(part, [opinion for opinion in opinions if opinion.part == part], rubric)
            for part, rubric in rubrics.items()
        )


def accuracy_values(results: Sequence[TaskAccuracy]) -> dict[str, float]:
    """Return verl's metric names -> accuracy, where there is one, and shares of answers that could not be judged."""
    values: dict[str, float] = {}
    for one in results:
        if one.accuracy is not None:
            values[f"val-core/{one.task}/acc/mean@1"] = one.accuracy
        for failure in (failure for failure in FailureType if failure.is_excluded):
            share = one.unscored.get(failure, 0) / (one.judged + sum(one.unscored.values()))
            values[f"val-aux/{one.task}/failure/{failure}/rate"] = share
    return values
