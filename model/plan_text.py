"""Plans as text, one fact a line.

What lives here: words. What does not: any number (`plan_model.py`, `plan_learner.py`, `plan_engine.py`,
`plan_traffic.py`, `plan_fit.py`).
"""

from collections.abc import Iterable

from rollforward.model.assignment import Assignment
from rollforward.model.plan_config import PlanRun
from rollforward.model.plan_engine import EnginePlan
from rollforward.model.plan_fit import Check
from rollforward.model.plan_learner import LearnerPlan
from rollforward.model.plan_model import Plan
from rollforward.model.plan_traffic import HiddenPlan, LogPlan, SyncPlan


def render_plan(model: str, plan: Plan) -> str:
    """Return the plan as text, one fact a line."""
    lines = [f"model {model}", f"{'dtype':<10}{'tensors':>10}{'bytes':>20}"]
    lines += [f"{row.dtype:<10}{row.num_tensors:>10,}{row.num_bytes:>20,}" for row in plan.dtypes]
    lines += [
        f"{'total':<10}{plan.num_tensors:>10,}{plan.num_bytes:>20,}",
        f"parameters {plan.num_parameters:,} + MTP {plan.num_mtp_parameters:,}",
        f"activated per token {plan.num_activated_parameters:,}, trained by RL {plan.num_trained_parameters:,}",
        f"KV cache {plan.cache.per_token:,.1f} bytes per token",
        f"windows {plan.cache.window:,} bytes per sequence",
        f"compressor state {plan.cache.state:,} bytes per sequence",
    ]
    return "\n".join(lines)


def render_learner_plan(plan: LearnerPlan) -> str:
    """Return who updates what, and how Muon's matrices lie on the ranks."""
    lines = ["learner with optim.type=hybrid_muon; with adamw, AdamW updates what is Muon's here"]
    lines += [f"{'updated':<27}{'by':<8}{'tensors':>8}{'matrices':>10}{'elements':>20}  why"]
    lines += [
        f"{row.rule.title:<27}{row.rule.updater:<8}{row.num_tensors:>8,}{row.num_matrices:>10,}"
        f"{row.num_elements:>20,}  {row.rule.reason}"
        for row in plan.rules
    ]
    for name, assignment in (("dense", plan.dense), ("experts", plan.experts)):
        lines += _assignment_lines(name, assignment)
    return "\n".join(lines + _memory_lines(plan))


def _memory_lines(plan: LearnerPlan) -> list[str]:
    memory = plan.memory
    rows = (
        ("masters and momenta, Muon dense", memory.muon_dense),
        ("masters and momenta, Muon experts", memory.muon_experts),
        ("parameters, AdamW", memory.adamw_parameters),
        ("masters and moments, AdamW, ZeRO-1", memory.adamw_state),
        ("published bytes, all tensors", memory.published),
        ("their values, FP32", memory.values),
        ("gradients of a micro-batch, FP32", memory.gradients),
        ("sums of gradients, AdamW and dense", memory.dense_sums),
        ("sums of gradients, experts", memory.expert_sums),
        ("total, without activations", memory.total),
        ("inputs of layers, micro-batch", plan.layer_inputs),
        ("total", plan.total),
    )
    return _table("memory of the fullest rank", rows)


def _table(title: str, rows: Iterable[tuple[str, int]]) -> list[str]:
    return [f"{title:<36}{'bytes':>24}"] + [f"  {name:<34}{size:>24,}" for name, size in rows]


def _assignment_lines(name: str, assignment: Assignment) -> list[str]:
    num_ranks = len(assignment.shares)
    counts = [len(share.matrices) for share in assignment.shares]
    mean_elements, mean_flops = assignment.num_elements / num_ranks, assignment.flops / num_ranks
    shapes = {matrix.ns_shape for share in assignment.shares for matrix in share.matrices}
    return [
        f"Muon {name}: groups {assignment.num_groups:,}, ranks of a group {num_ranks:,}, matrices "
        f"{assignment.num_matrices:,} (a rank {min(counts):,} to {max(counts):,}), shapes {len(shapes)}",
        f"  elements a rank: most {assignment.bucket_elements:,}, mean {mean_elements:,.0f}, "
        f"imbalance {assignment.bucket_elements / mean_elements:.3f}, padding {assignment.padding_share:.2%}",
        f"  Newton-Schulz GFLOP a rank: most {assignment.max_flops / 1e9:,.1f}, mean {mean_flops / 1e9:,.1f}, "
        f"imbalance {assignment.flops_imbalance:.3f}",
    ]


def render_engine_plan(plan: EnginePlan, run: PlanRun) -> str:
    """Return what a replica takes on the fullest of its GPUs."""
    rows = (
        (f"weights, {run.engine.weights}", plan.weight_bytes),
        (f"cache of {_count(plan.sequences_on_a_gpu, 'sequence')}", plan.cache_bytes),
        ("total, without activations", plan.total),
        ("of it one sequence", plan.cache.of_sequence(plan.context)),
    )
    load = (
        f"engine of {_count(plan.gpus, 'GPU')}, {_count(run.num_replicas, 'replica')}: each"
        f" {_count(plan.sequences, 'sequence')} of {plan.context:,} tokens"
    )
    return "\n".join(
        [load, *_table("memory of the fullest GPU", rows), *(f"  not yet: {what}" for what in not_yet(run))]
    )


def not_yet(run: PlanRun) -> tuple[str, ...]:
    """Return what a plan of an engine assumes that rollforward cannot do yet."""
    assumed = []
    if run.engine.weights != "fp32":
        assumed.append("an engine on a GPU; the one on CPUs holds FP32 values (engine.weights=fp32)")
    if run.engine.gpus > 1:
        assumed.append("experts of an engine divided over several GPUs")
    return tuple(assumed)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def render_traffic(sync: SyncPlan, log: LogPlan, hidden: HiddenPlan, run: PlanRun) -> str:
    """Return how long a publish takes, and what is written all the time."""
    replicas = run.num_replicas
    return "\n".join(
        [
            f"publish {sync.num_bytes:,} bytes ({sync.num_trained_bytes:,} of trained tensors) in {sync.num_shards:,}"
            f" shards of at most {sync.largest_shard:,}",
            f"  write {sync.write_s:,.2f} s + read by {_count(replicas, 'replica')} {sync.read_s:,.2f} s ="
            f" {sync.total_s:,.2f} s; a shard {sync.shard_s:,.2f} s",
            f"token log {log.total_per_token:,.2f} bytes a token ({log.bytes_per_token:,.2f} + routes"
            f" {log.route_bytes_per_token:,.2f} + kept sets {log.kept_bytes_per_token:,.2f})",
            f"  a replica {log.tokens_per_s:,.0f} tokens/s, {log.bytes_per_s / 1e6:,.3f} MB/s; all"
            f" {replicas * log.bytes_per_s / 1e6:,.3f} MB/s; a context {log.sequence_bytes:,} bytes",
            f"hidden states of {_count(run.teachers, 'teacher')} {hidden.bytes_per_token:,} bytes a token",
            f"  all replicas {hidden.bytes_per_s / 1e6:,.1f} MB/s; a context {hidden.sequence_bytes:,} bytes; a head"
            f" {hidden.head_bytes:,} bytes",
        ]
    )


def render_checks(checks: tuple[Check, ...], run: PlanRun) -> str:
    """Return what fits, a line each."""
    gpus = (
        f"{_count(run.num_gpus or 0, 'GPU')} of {run.gpu_bytes:,} bytes, {run.usable:.0%} usable: {run.usable_bytes:,}"
    )
    lines = [f"  {check.part:<34}{check.need:>24,}  {_verdict(check)}" for check in checks]
    return "\n".join([gpus, *lines])


def _verdict(check: Check) -> str:
    return "fits" if check.fits else f"does not fit, {check.need / check.have:,.2f} times what there is"
