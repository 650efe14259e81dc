"""Entry point of `rollforward eval`: accuracy of one model directory on held-out prompts, in one process."""

import json
from pathlib import Path

import msgspec

from rollforward.conf import console
from rollforward.model.backends import choose_kernels
from rollforward.rl.config import EvalRun
from rollforward.rl.errors import EvaluationError
from rollforward.rl.evaluation import Evaluator
from rollforward.rl.judge.report_verb import calibration_rows
from rollforward.rl.judge.seats import local_judging
from rollforward.rl.metrics import describe_mute_tools
from rollforward.rl.sandboxes import local_environment
from rollforward.rl.setup import check_kernels, load_parts
from rollforward.rollout.replica import Replica
from rollforward.rollout.weights import (
    WEIGHTS_NAME,
    check_acknowledgement,
    checkpoint_source,
    publish_weights,
    version_directory,
)


def main(run: EvalRun) -> int:
    """Evaluate and print; the answers are in ``run_dir/eval.json``. Returns 0."""
    choose_kernels(run.kernels, "the run")
    run_dir = Path(run.run_dir).resolve()
    model_dir = Path(run.model_dir)
    parts = load_parts(
        model_dir,
        run.tasks,
        max_prompt_tokens=run.max_prompt_tokens,
        max_new_tokens=run.sampling.max_new_tokens,
        sandbox=run.sandbox,
        asks=("heldout",),
    )
    check_kernels(run.kernels, parts, run.model_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    evaluator = Evaluator(parts.tasks, parts.encoder, num_prompts=run.prompts, sampling=run.sampling, run_seed=run.seed)
    environment = local_environment(parts, run_dir=run_dir, rollout=run.rollout, sandbox=run.sandbox)
    root = run_dir / WEIGHTS_NAME
    # Without a canary: no forward but the engine's is here, and one of its own would take the model's memory twice.
    manifest = publish_weights(root, 0, parts.model_config, checkpoint_source(model_dir, parts.model_config))
    replica = Replica(
        "eval",
        run_dir / "wal" / "eval",
        parts.model_config,
        precision=run.precision,
        config=run.rollout,
        environment=environment,
    )
    try:
        check_acknowledgement(manifest, replica.load_weights(version_directory(root, 0)))
        with local_judging(
            parts.judges,
            replica,
            encoding=parts.encoding,
            model_config=parts.model_config,
            run_dir=run_dir,
            rollout=run.rollout,
            run_seed=run.seed,
        ) as judging:
            results = evaluator.evaluate(replica.generate, step=0, policy_version=0, judging=judging)
        for said in describe_mute_tools([replica.log_stats()]):
            console.say(said)
    finally:
        replica.close()
        parts.grader.close()
    (run_dir / "eval.json").write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    if unknown := [one.task for one in results if one.accuracy is None]:
        raise EvaluationError(
            f"not one of the answers to {', '.join(unknown)} could be judged ({run_dir / 'eval.json'} has the counts)."
            " Mend what failed and repeat the command: it goes on from its log"
        )
    rows: dict[str, object] = {f"{one.task} accuracy": f"{one.shown} ({one.correct}/{one.judged})" for one in results}
    for one in results:
        for judged in one.calibrations:
            who = one.task if judged.part == one.task else f"{one.task}/{judged.part}"
            rows |= {f"{who} {name}": value for name, value in calibration_rows(judged).items()}
    console.summary(f"evaluated {model_dir}", rows | {"answers": run_dir / "eval.json"})
    console.result(json.dumps({"tasks": {one.task: one.accuracy for one in results}, "run_dir": str(run_dir)}))
    return 0
