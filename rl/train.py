"""Entry point of `rollforward train`: check, place actors, run the loop (controller.py), say what came of it. The loop
of other kinds of run is started here too (`run_loop`)."""

import json
import re
import shlex
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError

from rollforward.conf import console
from rollforward.conf.load import is_ray_job, library_environment
from rollforward.model.backends import choose_kernels
from rollforward.model.config import ModelConfig
from rollforward.model.distributed import new_rendezvous
from rollforward.model.train_config import Precision
from rollforward.rl.actors import LearnerActor, LearnerPool, PolicyPool
from rollforward.rl.answers import ANSWERS_NAME
from rollforward.rl.config import LoopRun, RLRun
from rollforward.rl.controller import Controller, RunOutcome, evaluation_name
from rollforward.rl.errors import LostProcessError
from rollforward.rl.judge.seats import JudgeModel, Judges
from rollforward.rl.learner import LearnerSettings
from rollforward.rl.placement import Patience, check_cluster, join_cluster, lacking_code
from rollforward.rl.quantised import check_quantised
from rollforward.rl.sandboxes import agent_settings, pool_stats, with_agents
from rollforward.rl.setup import Parts, check_kernels, check_learner, load_parts
from rollforward.rl.stages import PolicyGradientStages, Stages
from rollforward.rl.tracker import METRICS_NAME, Tracker
from rollforward.rollout.actors import AgentActor, RolloutActor
from rollforward.rollout.agents import LocalAccess
from rollforward.rollout.drain_file import DRAIN_NAME, DrainFile
from rollforward.rollout.environment import EnvironmentConfig
from rollforward.rollout.placement import ActorAccess, RayHost, lacking, placement_options
from rollforward.rollout.supervisor import Supervisor
from rollforward.rollout.weights import WEIGHTS_NAME, version_directory
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.placement import sandbox_actors

Place = Callable[[], tuple[PolicyPool, Stages]]
"""Places the learner of a run and returns it with the stages that use it."""


def main(run: RLRun) -> int:
    """Run the loop to its end; a run directory that holds a checkpoint is continued.

    Returns:
        0. Errors are raised: user mistakes as ValueError, the world's failures as RuntimeError.
    """

    def place() -> tuple[LearnerPool, PolicyGradientStages]:
        settings = LearnerSettings(algorithm=run.algo, **policy_settings(run))
        learner = LearnerPool(rank_actors(LearnerActor, run), settings, *patience_of(run))
        return learner, PolicyGradientStages(run, learner)

    return run_loop(run, lambda _: place)


def run_loop(run: LoopRun, prepare: Callable[[Parts], Place]) -> int:
    """Run the loop of any kind of run to its end; a run directory that holds a checkpoint is continued.

    Args:
        run: the configuration.
        prepare: refuses what is wrong with the run's own settings, before anything is allocated, and returns what
            places its learner, called once the cluster is joined and the replicas are on their way.

    Returns:
        0. Errors are raised: user mistakes as ValueError, the world's failures as RuntimeError.
    """
    start_s = time.monotonic()
    run_dir = Path(run.run_dir).resolve()
    if works_here(run):  # elsewhere each process says it itself
        choose_kernels(run.kernels, "the run")
    check_cluster(run.cluster)
    parts = load_parts(
        Path(run.model_dir).resolve(),
        run.tasks,
        max_prompt_tokens=run.max_prompt_tokens,
        max_new_tokens=run.sampling.max_new_tokens,
        sandbox=run.sandbox,
    )
    check_kernels(run.kernels, parts, run.model_dir, works_here=works_here(run))
    check_learner(parts.model_config, run.optim, run.cluster.learner_ranks)
    place = prepare(parts)
    run_dir.mkdir(parents=True, exist_ok=True)
    with losses_named(), ExitStack() as stack:
        tracker = stack.enter_context(Tracker(run_dir, run.tracker, run_config=msgspec.to_builtins(run)))
        stack.callback(ray.shutdown)  # before init, which starts processes one after another
        join_cluster(run.cluster)
        # Ray's own handler aborts the process and closes nothing; an orderly end is an interruption like Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        stack.callback(parts.grader.close)
        environment = _place_sandboxes(run, parts, run_dir) if parts.needs_sandboxes else parts.environment
        rollout = _place_replicas(run, parts, run_dir, environment)
        judge_engines = [_place_judge(run, model, run_dir) for model in parts.judges]
        learner, stages = place()
        check_quantised(learner.quantised(), parts.model_config, run.precision)
        judges = Judges(parts.judges, judge_engines, run_dir=run_dir, run_seed=run.seed)
        judges.open()
        outcome = Controller(
            run,
            stages=stages,
            tasks=parts.tasks,
            encoder=parts.encoder,
            rollout=rollout,
            learner=learner,
            tracker=tracker,
            pool=partial(pool_stats, parts) if parts.needs_sandboxes else None,
            judges=judges,
            judging=judges.judging(rollout.generate, parts.encoding, parts.model_config),
        ).run()
        judges.close()
        rollout.close()
    trained_dir = run_dir / "model"
    if not trained_dir.exists():
        version_directory(run_dir / WEIGHTS_NAME, run.steps).rename(trained_dir)
    _report(run, run_dir, outcome, tracker, time.monotonic() - start_s)
    return 0


def works_here(run: LoopRun) -> bool:
    """Whether all processes of a run will be on this machine."""
    return run.cluster.address is None and not is_ray_job()


@contextmanager
def losses_named() -> Generator[None]:
    """Says in a line which process of the run died, where Ray says it in a page.

    Raises:
        LostProcessError: in place of Ray's error; one from a constructor is left as it is, since it holds the cause.
        ClusterError: a node cannot import the code.
    """
    try:
        yield
    except RayActorError as error:
        if error.actor_init_failed:
            if (lacking := lacking_code(error)) is not None:
                raise lacking from error
            raise
        facts = dict(re.findall(r"^\s*(class_name|pid|ip): ([\w.:]+)$", str(error), flags=re.MULTILINE))
        if "node has died" in str(error):
            raise LostProcessError(
                f"{facts.get('class_name', 'an actor')} died with its node ({facts.get('ip', 'of unknown address')});"
                " what was durable is kept. `rollforward resume` with the run's directory goes on, on nodes that are"
                " left"
            ) from error
        raise LostProcessError(
            f"{facts.get('class_name', 'an actor')} (pid {facts.get('pid', 'unknown')}) died; what was durable is kept."
            " The kernel ends a process when memory runs out (see dmesg): then lower micro_batch_tokens. `rollforward"
            " resume` with the run's directory goes on"
        ) from error


def _place_sandboxes(run: LoopRun, parts: Parts, run_dir: Path) -> EnvironmentConfig | None:
    """Start the actors that have sandboxes, see that they can make the run's, and say who holds those of completions:
    replicas, or actors of their own."""
    transports, missing = sandbox_actors(run.sandbox.container, run_dir)
    for sentence in missing:
        console.say(f"sandboxes: {sentence}")
    settings = agent_settings(parts, transports, run_dir=run_dir, rollout=run.rollout, sandbox=run.sandbox)
    if run.rollout.agent_loop == "replica":
        return with_agents(parts.environment, LocalAccess(settings=settings))
    asked = run.rollout.agent_resources
    if (without := lacking(asked, what="an agent actor", key="rollout.agent_resources")) is not None:
        raise SandboxUnavailableError(without)
    shared = ray.put(settings)  # held by the access below: an actor that is started again needs it again
    actors = [
        AgentActor.options(**placement_options(asked)).remote(shared, f"agents-{index}")
        for index in range(run.rollout.agent_actors)
    ]
    return with_agents(parts.environment, ActorAccess(actors, kept=shared))


def _place_replicas(run: LoopRun, parts: Parts, run_dir: Path, answering: EnvironmentConfig | None) -> Supervisor:
    """Start one actor a replica, which is replaced when it is lost."""
    names = [f"engine-{index}" for index in range(run.rollout.engines)]
    host = _replica_host(run, run_dir, names, parts.model_config, run.precision, answering)
    drain_file = DrainFile(run_dir / DRAIN_NAME, names, announce=console.say)
    return Supervisor(host, names, run.rollout, notices=drain_file.read, announce=console.say)


def _place_judge(run: LoopRun, model: JudgeModel, run_dir: Path) -> Supervisor:
    """Start the engines of a model that judges, which are replaced like the policy's."""
    names = model.engine_names
    host = _replica_host(run, run_dir, names, model.model_config, model.judge.precision, None)
    return Supervisor(host, names, run.rollout, announce=console.say)


def _replica_host(
    run: LoopRun,
    run_dir: Path,
    names: Sequence[str],
    model_config: ModelConfig,
    precision: Precision,
    answering: EnvironmentConfig | None,
) -> RayHost:
    return RayHost(
        lambda index: RolloutActor.options(
            **placement_options(run.cluster.replica_resources), runtime_env=_process_environment()
        ).remote(
            names[index],
            run_dir / "wal" / names[index],
            model_config,
            precision,
            run.rollout,
            answering,
            run.kernels,
        ),
        run.cluster.replica_resources,
    )


def policy_settings(run: LoopRun) -> dict[str, Any]:
    """Return what every rank is told of a run, the fields of ``PolicySettings``."""
    return {
        "model_dir": str(Path(run.model_dir).resolve()),
        "optim": run.optim,
        "precision": run.precision,
        "temperature": run.sampling.temperature,
        "threads": run.cluster.learner_threads,
        "balance": run.balance,
        "recompute": run.recompute,
        "kernels": run.kernels,
        "seed": run.seed,
    }


def rank_actors(actor_class: Any, run: LoopRun) -> list[Any]:
    """Start one actor a rank of the learner, which is not replaced; rank 0 first."""
    rendezvous = new_rendezvous(Path(run.run_dir).resolve())
    num_ranks = run.cluster.learner_ranks
    return [
        actor_class.options(
            **placement_options(run.cluster.learner_resources), runtime_env=_process_environment()
        ).remote(rank, num_ranks, rendezvous, run.cluster.rank_timeout_s)
        for rank in range(num_ranks)
    ]


def patience_of(run: LoopRun) -> tuple[Patience, Mapping[str, float]]:
    """Return how long the ranks are waited for, and what each asks of its node; see ``Ranks``."""
    patience = Patience(start_s=run.rollout.start_timeout_s, silent_s=run.cluster.learner_heartbeat_timeout_s)
    return patience, run.cluster.learner_resources


def _process_environment() -> dict[str, Any]:
    return {"env_vars": library_environment()}


def _report(run: LoopRun, run_dir: Path, outcome: RunOutcome, tracker: Tracker, seconds: float) -> None:
    tasks = {
        before.task: {"eval_before": before.accuracy, "eval_after": after.accuracy}
        for before, after in zip(outcome.before, outcome.after, strict=True)
    }
    gains: list[float] = []
    rows: dict[str, object] = {}
    for before, after in zip(outcome.before, outcome.after, strict=True):
        text = f"{before.shown} -> {after.shown}"
        if before.accuracy is not None and after.accuracy is not None:
            gains.append(after.accuracy - before.accuracy)
            text += f" ({gains[-1]:+.3f})"
        rows[f"{before.task} accuracy"] = text
    model_dir = run_dir / "model"
    rows |= {
        "model": model_dir,
        "held-out answers": run_dir / evaluation_name(outcome.steps),
        "sampled answers": run_dir / ANSWERS_NAME,
        "metrics": run_dir / METRICS_NAME,
        "token log": run_dir / "wal",
    }
    then = {
        "in Python": f"rollforward.model.load_model({str(model_dir)!r}, precision={run.precision!r})",
        "as a checkpoint": f"rollforward export {shlex.quote(f'run_dir={run_dir}')} to=DIR",
    }
    if tracker.wandb_place is not None:
        rows["W&B"] = tracker.wandb_place
        if run.tracker.mode == "offline":
            then["to W&B"] = f"wandb sync {shlex.quote(tracker.wandb_place)}/offline-run-*"
    console.summary(f"trained {outcome.steps} steps in {seconds:.0f} s", rows, then)
    result = {
        "tasks": tasks,
        "eval_gain_min": round(min(gains), 6) if gains else None,
        "steps": outcome.steps,
        "rollout_probs_diff_max": outcome.rollout_probs_diff_max,
        "tokens": outcome.trained_tokens,
        "seconds": round(seconds, 1),
        "run_dir": str(run_dir),
    }
    console.result(json.dumps(result))
