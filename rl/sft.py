"""Entry point of `rollforward sft`: supervised fine-tuning on the tasks' rendered conversations, in one process.

ConversationSource --micro-batches--> Trainer.train_step (mean negative log-prob of the answers) --> checkpoint, model
"""

import json
import time
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from rollforward.conf import console
from rollforward.model.backends import choose_kernels
from rollforward.model.checkpoint import read_checkpoint, write_checkpoint
from rollforward.model.config import ModelConfig, preset
from rollforward.model.distributed import join_group, leave_group, new_rendezvous
from rollforward.model.encoding_version import ENCODING_FILE, LATER, encoding_file, encoding_files
from rollforward.model.init import fresh_params
from rollforward.model.metrics import metric_values
from rollforward.model.tokenizer import train_tokenizer
from rollforward.model.trainer import LossPart, Trainer
from rollforward.rl.checkpoints import CHECKPOINTS_NAME, LoopState, is_due, restore, save_checkpoint
from rollforward.rl.config import FreshModel, SFTRun
from rollforward.rl.conversations import ConversationSource, tokenizer_texts
from rollforward.rl.evaluation import Evaluator, TaskAccuracy, accuracy_values
from rollforward.rl.judge.seats import local_judging
from rollforward.rl.learner import TOKENIZER_NAME, publish_trained, scoring_batch, worst_sequences
from rollforward.rl.losses.supervised import supervised_loss
from rollforward.rl.quantised import check_quantised
from rollforward.rl.sandboxes import local_environment
from rollforward.rl.setup import Parts, SettingNames, check_kernels, load_parts
from rollforward.rl.tasks.registry import build_tasks
from rollforward.rl.tracker import METRICS_NAME, Tracker
from rollforward.rollout.replica import Replica
from rollforward.rollout.types import SamplingParams
from rollforward.rollout.weights import WEIGHTS_NAME, check_acknowledgement, version_directory

SETTING_NAMES = SettingNames(model_dir="start.model_dir", max_new_tokens="max_answer_tokens")
"""Of this verb."""


def main(run: SFTRun) -> int:
    """Run the stage to its end; a run directory that holds a checkpoint is continued.

    Returns:
        0. Errors are raised: user mistakes as ValueError, the world's failures as RuntimeError.
    """
    start_s = time.monotonic()
    choose_kernels(run.kernels, "the run")
    run_dir = Path(run.run_dir).resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    model_dir = (
        _fresh_model(run.start, run, run_dir) if isinstance(run.start, FreshModel) else Path(run.start.model_dir)
    )
    parts = load_parts(
        model_dir,
        run.tasks,
        max_prompt_tokens=run.max_prompt_tokens,
        max_new_tokens=run.max_answer_tokens,
        sandbox=run.sandbox,
        names=SETTING_NAMES,
    )
    check_kernels(run.kernels, parts, str(model_dir))
    data = conversations_of(run, parts)
    torch.set_num_threads(run.rollout.threads)
    join_group(new_rendezvous(run_dir), rank=0, num_ranks=1)
    try:
        with Tracker(run_dir, run.tracker, run_config=msgspec.to_builtins(run)) as tracker:
            accuracy = SFTLoop(run, parts, data, model_dir, tracker).run()
    finally:
        leave_group()
        parts.grader.close()
    rows: dict[str, object] = {
        f"{one.task} accuracy": one.shown if one.accuracy is None else one.accuracy for one in accuracy
    }
    rows |= {"model": run_dir / "model", "metrics": run_dir / METRICS_NAME}
    if tracker.wandb_place is not None:
        rows["W&B"] = tracker.wandb_place
    console.summary(f"fine-tuned {run.steps} steps in {time.monotonic() - start_s:.0f} s", rows)
    result = {"tasks": {one.task: {"eval_after": one.accuracy} for one in accuracy}, "steps": run.steps}
    console.result(json.dumps({**result, "run_dir": str(run_dir)}))
    return 0


def conversations_of(run: SFTRun, parts: Parts) -> ConversationSource:
    """Return what a run learns from.

    Raises:
        TaskError: as ``ConversationSource``.
    """
    return ConversationSource(
        parts.tasks,
        parts.encoding,
        seed=run.seed,
        max_tokens=run.micro_batch_tokens,
        max_prompt_tokens=run.max_prompt_tokens,
        max_answer_tokens=run.max_answer_tokens,
    )


class SFTLoop:
    """Steps over packed conversations, evaluates, checkpoints; resumes from the newest checkpoint."""

    def __init__(self, run: SFTRun, parts: Parts, data: ConversationSource, model_dir: Path, tracker: Tracker) -> None:
        """Build evaluator and, once nothing else can be refused, the trainer.

        Args:
            run: the configuration. parts: model config, encoding, tasks. data: of ``conversations_of``.
            model_dir: where masters come from. tracker: where metrics go.

        Raises:
            QuantisationError: the trainer does not take every tensor through its published format.
            SandboxError, ToolError: see ``local_environment``.
        """
        self._run, self._parts, self._data, self._tracker = run, parts, data, tracker
        self._run_dir = Path(run.run_dir).resolve()
        self._evaluator = Evaluator(
            parts.tasks,
            parts.encoder,
            num_prompts=run.eval.prompts,
            sampling=SamplingParams(max_new_tokens=run.max_answer_tokens, temperature=run.eval.temperature),
            run_seed=run.seed,
        )
        self._environment = local_environment(parts, run_dir=self._run_dir, rollout=run.rollout, sandbox=run.sandbox)
        self._files = {TOKENIZER_NAME: (model_dir / TOKENIZER_NAME).read_bytes(), **encoding_files(model_dir)}
        self._trainer = Trainer(
            parts.model_config,
            read_checkpoint(model_dir, parts.model_config),
            precision=run.precision,
            optim=run.optim,
            balance=run.balance,
            recompute=run.recompute,
            seed=run.seed,
        )
        check_quantised([self._trainer.quantised], parts.model_config, run.precision)

    def run(self) -> tuple[TaskAccuracy, ...]:
        """Do what is left of the run; the model is written to ``run_dir/model``. Returns the final accuracy."""
        checkpoints = self._run_dir / CHECKPOINTS_NAME
        state = restore(checkpoints, self._trainer.load, LoopState(step=0, cursor=self._data.start()))
        self._tracker.begin(state.tracker)
        accuracy: tuple[TaskAccuracy, ...] = ()
        with console.Progress("sft", self._run.steps, done=state.step, every=10) as progress:
            while state.step < self._run.steps:
                state, values = self._step(state)
                shown: dict[str, object] = {"loss": values["sft/loss"], "tokens_per_s": values["perf/throughput"]}
                if self._is_due(state.step, self._run.eval.every_steps):
                    accuracy = self._evaluate(state.step)
                    values |= accuracy_values(accuracy)
                    shown |= {f"{one.task} accuracy": one.accuracy for one in accuracy if one.accuracy is not None}
                # Logged before the checkpoint: a step that a killed run repeats stands twice, none is missing.
                self._tracker.log(state.step, values)
                progress.step(shown)
                if self._is_due(state.step, self._run.checkpoint_every_steps):
                    state = msgspec.structs.replace(state, tracker=self._tracker.state)
                    save_checkpoint(checkpoints, state, self._trainer.save, keep=self._run.keep_checkpoints)
        model_dir = self._run_dir / "model"
        if not model_dir.exists():
            version_directory(self._run_dir / WEIGHTS_NAME, self._run.steps).rename(model_dir)
        return accuracy or self._evaluate(state.step)

    def _step(self, state: LoopState) -> tuple[LoopState, dict[str, float]]:
        start_s = time.monotonic()
        batches, cursor = self._data.draw(state.cursor, self._run.micro_batches_per_step)

        def loss_of(index: int, policy_logprobs_T: Tensor, _entropy_T: Tensor) -> LossPart:
            batch = batches[index]
            output = supervised_loss(
                policy_logprobs_T,
                torch.tensor(batch.trained_mask_T),
                torch.tensor(batch.token_weight_T),
                batch.sequence_lengths_B.tolist(),
            )
            worst = worst_sequences(batch.ids, output.trajectory_loss_N)
            return LossPart(loss=output.loss, name=f"micro-batch {index + 1} of {len(batches)}", worst=worst)

        result = self._trainer.train_step([scoring_batch(batch) for batch in batches], loss_of)
        num_tokens = sum(batch.token_ids_T.size for batch in batches)
        values = {
            "sft/loss": result.loss,
            "sft/grad_norm": result.grad_norm,
            "sft/lr": result.learning_rate,
            "perf/throughput": num_tokens / (time.monotonic() - start_s),
            **metric_values(result.metrics),
        }
        return LoopState(step=state.step + 1, cursor=cursor), values

    def _evaluate(self, step: int) -> tuple[TaskAccuracy, ...]:
        """Publish the policy after ``step`` steps and answer the held-out questions with the engine."""
        root = self._run_dir / WEIGHTS_NAME
        manifest = publish_trained(root, step, self._trainer, self._files)
        replica = Replica(
            "eval",
            self._run_dir / "wal" / "eval",
            self._parts.model_config,
            precision=self._run.precision,
            config=self._run.rollout,
            environment=self._environment,
        )
        try:
            check_acknowledgement(manifest, replica.load_weights(version_directory(root, step)))
            with local_judging(
                self._parts.judges,
                replica,
                encoding=self._parts.encoding,
                model_config=self._parts.model_config,
                run_dir=self._run_dir,
                rollout=self._run.rollout,
                run_seed=self._run.seed,
            ) as judging:
                return self._evaluator.evaluate(replica.generate, step=step, policy_version=step, judging=judging)
        finally:
            replica.close()

    def _is_due(self, step: int, every_steps: int) -> bool:
        return is_due(step, every_steps, self._run.steps)


def _fresh_model(start: FreshModel, run: SFTRun, run_dir: Path) -> Path:
    """Write an untrained model with a tokenizer of its own into ``run_dir/init`` and return that directory."""
    directory = run_dir / "init"
    if not directory.exists():
        tasks = build_tasks(run.tasks)
        tokenizer = train_tokenizer(tokenizer_texts(tasks, start.tokenizer.num_conversations), start.tokenizer)
        config: ModelConfig = msgspec.structs.replace(
            preset(start.preset),
            vocab_size=tokenizer.vocab_size,
            bos_token_id=tokenizer.bos_id,
            eos_token_id=tokenizer.eos_id,
        )
        named = fresh_params(config, seed=start.seed)
        files = {TOKENIZER_NAME: tokenizer.serialized.encode(), ENCODING_FILE: encoding_file(LATER)}
        write_checkpoint(directory, config, named, precision="fp32", extra_files=files)
    return directory
