"""The optimizer's table: who updates each tensor, and which whole matrices Muon orthogonalises.

What lives here: one declared rule for each kind of tensor (`declared_rules`), the choices where the report is silent
(`MuonSplit`), and the table of a model (`tensor_roles`). What does not: who computes which matrix (`assignment.py`).
This module imports neither torch nor ray.

Local letters: n the smaller and m the larger side of a matrix.
Source: DeepSeek-V4 report 2.4 and 4.2.2; AdamW for embedding, head, mHC static terms and norms, everything else Muon.
"""

import re
from typing import Literal

import msgspec

from rollforward.model.config import ModelConfig
from rollforward.model.shapes import TensorSpec, param_specs

Updater = Literal["muon", "adamw", "frozen"]
"""Who updates a tensor; frozen ones get neither an update nor decay."""

Blocks = Literal["whole", "experts", "mappings", "heads", "groups", "halves", "column_halves"]
"""How a tensor falls into logical matrices. whole: it is one. experts: one for each routed expert. mappings: the rows
for pre, post and comb of a hyper-connection. heads: the rows of each query head. groups: the rows of each output group.
halves: the rows of the two roles of an overlapping (CSA) compressor, one matrix where nothing overlaps (HCA).
column_halves: the same along columns."""

NS_STEPS = 10
"""Newton-Schulz iterations of an update: 8, then 2 with other coefficients."""


class MuonSplit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is one logical matrix where the report does not say. The default follows the report's equations: what has
    a symbol of its own there, or multiplies inputs of its own, is a matrix of its own.
    """

    hc_fn: Literal["mappings", "whole"] = "mappings"
    """Projection of a hyper-connection, [2M + M*M, M*D]: W_pre, W_post and W_res are three symbols and have three
    static terms and three gating factors.
    """
    csa_compressor: Literal["halves", "whole"] = "halves"
    """wkv and wgate of a CSA layer, [2H, D]: the current and the previous window's role are two symbols, a and b."""
    wo_a: Literal["groups", "whole"] = "groups"
    """First output projection: each group multiplies heads of its own, so the rows only lie together."""
    wq_b: Literal["whole", "heads"] = "whole"
    """Query up-projection: one symbol for all heads, which share their input. `heads` is the split of GLM."""
    ape: Literal["adamw", "muon"] = "adamw"
    """Position bias of a compressor, [ratio, columns]: added, never multiplied, so a static term like the mHC ones.
    `muon` splits it as csa_compressor does.
    """


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """How one kind of tensor is updated."""

    title: str
    """What the tensors are."""
    pattern: str
    """Regular expression of the whole canonical name."""
    updater: Updater
    """Who updates them."""
    blocks: Blocks = "whole"
    """Their logical matrices, where Muon does."""
    reason: str
    """Why."""


class LogicalMatrix(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A matrix that Muon orthogonalises as one: a block of a tensor. Never cut between ranks.

    Example: group 1 of Flash's wo_a is rows 1024 to 2047, all 4096 columns, of `layers.0.attn.wo_a.weight`.
    """

    tensor: str
    """Canonical name."""
    expert: int = 0
    """Index into a stacked tensor; 0 where nothing is stacked."""
    row: int = 0
    """First row."""
    column: int = 0
    """First column."""
    num_rows: int
    """Rows."""
    num_columns: int
    """Columns."""

    @property
    def num_elements(self) -> int:
        """Rows x columns."""
        return self.num_rows * self.num_columns

    @property
    def ns_shape(self) -> tuple[int, int]:
        """(n, m): the orientation in which Newton-Schulz runs; matrices of one such shape are batched."""
        return min(self.num_rows, self.num_columns), max(self.num_rows, self.num_columns)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the Newton-Schulz steps, symmetry unused.

        A step is A = X X^T, A A and (bA + cA A) X: 4 n^2 m + 2 n^3.
        Example: 2 x 3 costs 10 (4 * 4 * 3 + 2 * 8) = 640.
        """
        small, large = self.ns_shape
        return NS_STEPS * (4 * small * small * large + 2 * small**3)


class TensorRole(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    spec: TensorSpec
    """The tensor."""
    rule: Rule
    """The rule that it falls under."""
    matrices: tuple[LogicalMatrix, ...]
    """What Muon sees: every element once; empty for other updaters."""


def declared_rules(split: MuonSplit) -> tuple[Rule, ...]:
    """Return the rules. Every tensor of every model falls under exactly one."""
    layer, compressor = r"layers\.\d+\.", r"layers\.\d+\.attn\.compressor\."
    ape_blocks: Blocks = "column_halves" if split.csa_compressor == "halves" else "whole"
    return (
        Rule(
            title="attention projections",
            pattern=layer + r"attn\.(wq_a|wkv|wo_b)\.weight",
            updater="muon",
            reason="one projection each",
        ),
        Rule(
            title="query up-projections",
            pattern=layer + r"attn\.wq_b\.weight",
            updater="muon",
            blocks=split.wq_b,
            reason=f"split.wq_b={split.wq_b}",
        ),
        Rule(
            title="grouped output projections",
            pattern=layer + r"attn\.wo_a\.weight",
            updater="muon",
            blocks=split.wo_a,
            reason=f"split.wo_a={split.wo_a}",
        ),
        Rule(
            title="compressor projections",
            pattern=compressor + r"(wkv|wgate)\.weight",
            updater="muon",
            blocks=split.csa_compressor,
            reason=f"split.csa_compressor={split.csa_compressor}",
        ),
        Rule(
            title="mHC projections",
            pattern=layer + r"hc_(attn|ffn)_fn",
            updater="muon",
            blocks=split.hc_fn,
            reason=f"split.hc_fn={split.hc_fn}",
        ),
        Rule(title="final mHC projection", pattern=r"hc_head_fn", updater="muon", reason="W_pre alone"),
        Rule(title="routers", pattern=layer + r"ffn\.gate\.weight", updater="muon", reason="one projection each"),
        Rule(
            title="shared experts",
            pattern=layer + r"ffn\.shared_experts\.w[123]\.weight",
            updater="muon",
            reason="gate, up and down are separate matrices",
        ),
        Rule(
            title="routed experts",
            pattern=layer + r"ffn\.experts\.w[123]\.weight",
            updater="muon",
            blocks="experts",
            reason="each expert is independent; gate, up and down are separate matrices",
        ),
        Rule(title="embedding", pattern=r"embed\.weight", updater="adamw", reason="rows are looked up"),
        Rule(title="head", pattern=r"head\.weight", updater="adamw", reason="as the report does"),
        Rule(
            title="norms",
            pattern=rf"norm\.weight|{layer}(attn_norm|ffn_norm|attn\.(q_norm|kv_norm|compressor\.norm))\.weight",
            updater="adamw",
            reason="vectors",
        ),
        Rule(title="attention sinks", pattern=layer + r"attn\.attn_sink", updater="adamw", reason="vectors"),
        Rule(
            title="mHC static terms",
            pattern=rf"({layer}hc_(attn|ffn)|hc_head)_(base|scale)",
            updater="adamw",
            reason="biases and gating factors",
        ),
        Rule(
            title="compressor position biases",
            pattern=compressor + r"ape",
            updater=split.ape,
            blocks=ape_blocks,
            reason=f"split.ape={split.ape}",
        ),
        Rule(
            title="gate biases",
            pattern=layer + r"ffn\.gate\.bias",
            updater="frozen",
            reason="chooses experts only, so it has no gradient; load balancing moves it, not an optimizer",
        ),
        Rule(
            title="token-to-expert tables",
            pattern=layer + r"ffn\.gate\.tid2eid",
            updater="frozen",
            reason="integers",
        ),
        Rule(
            title="indexers",
            pattern=layer + r"attn\.indexer\..*",
            updater="frozen",
            reason="chooses entries only, so the policy's loss has no gradient for it",
        ),
        Rule(title="MTP", pattern=r"mtp\..*", updater="frozen", reason="the policy's loss does not run through it"),
    )


def tensor_roles(config: ModelConfig, split: MuonSplit) -> tuple[TensorRole, ...]:
    """Return the table of a model: one row per canonical tensor, in the order of `param_specs`.

    Args:
        config: the model.
        split: the open points.

    Returns:
        Rows whose matrices cover each tensor of Muon's exactly once.

    Invariants: deterministic. A tensor without a rule, or with two, is a bug here and an assertion.
    """
    rules = [(re.compile(rule.pattern), rule) for rule in declared_rules(split)]
    roles: list[TensorRole] = []
    for spec in param_specs(config):
        found = [rule for pattern, rule in rules if pattern.fullmatch(spec.name)]
        assert len(found) == 1, f"{spec.name} falls under {len(found)} rules"
        (rule,) = found
        assert spec.trained == (rule.updater != "frozen"), f"{spec.name} is trained or not, but {rule.updater}"
        matrices = _matrices(spec, rule.blocks, config) if rule.updater == "muon" else ()
        roles.append(TensorRole(spec=spec, rule=rule, matrices=matrices))
    return tuple(roles)


def dense_matrices(roles: tuple[TensorRole, ...]) -> tuple[LogicalMatrix, ...]:
    """Return Muon's matrices outside routed experts, in the table's order."""
    return tuple(matrix for role in roles if role.rule.blocks != "experts" for matrix in role.matrices)


def expert_matrices(roles: tuple[TensorRole, ...]) -> tuple[LogicalMatrix, ...]:
    """Return routed experts' matrices in flat order: every layer's down, then every gate, then every up.

    Within each: by layer, then by expert.
    """
    experts = [role for role in roles if role.rule.blocks == "experts"]
    order = [role for name in ("w2", "w1", "w3") for role in experts if f".{name}." in role.spec.name]
    return tuple(matrix for role in order for matrix in role.matrices)


def _matrices(spec: TensorSpec, blocks: Blocks, config: ModelConfig) -> tuple[LogicalMatrix, ...]:
    *_, rows, columns = spec.shape
    if blocks == "experts":
        return tuple(
            LogicalMatrix(tensor=spec.name, expert=expert, num_rows=rows, num_columns=columns)
            for expert in range(spec.shape[0])
        )
    if blocks == "column_halves":
        width = columns // _num_roles(spec, config)
        starts = range(0, columns, width)
        return tuple(
            LogicalMatrix(tensor=spec.name, column=start, num_rows=rows, num_columns=width) for start in starts
        )
    heights = _heights(spec, blocks, config)
    starts = [sum(heights[:index]) for index in range(len(heights))]
    return tuple(
        LogicalMatrix(tensor=spec.name, row=start, num_rows=height, num_columns=columns)
        for start, height in zip(starts, heights, strict=True)
    )


def _heights(spec: TensorSpec, blocks: Blocks, config: ModelConfig) -> list[int]:
    """Rows of each block from the top."""
    rows, streams = spec.shape[0], config.hc_mult
    if blocks == "mappings":
        return [streams, streams, streams * streams]
    counts = {"heads": config.num_attention_heads, "groups": config.o_groups, "halves": 0, "whole": 1}
    count = _num_roles(spec, config) if blocks == "halves" else counts[blocks]
    return [rows // count] * count


def _num_roles(spec: TensorSpec, config: ModelConfig) -> int:
    """Roles of a compressor's columns: two where windows overlap."""
    layer = int(spec.name.split(".")[1])
    return 2 if config.layer_kind(layer) == "csa" else 1
