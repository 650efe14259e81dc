"""Native mode layer by layer: our tensors before and after every quantiser against transformers' modules.

The oracle carries the same published weights. Each of our layers gets the input that the oracle's layer had. Before a
quantiser ours may differ from the oracle's by 1e-5; after it 99.9 % of the codes are equal to those of the quantisers
written here from the specification (section 4), and the rest are one code away. From there on the oracle continues with
OUR quantised values: else one code that falls to the other side would be counted again in everything behind it.

Not proven here: all 16 codes and all scales (kernels/quant/), formats of weights (model/test_precision.py).
"""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from rollforward.model import attention as attention_module
from rollforward.model.attention import AttentionContext, attention
from rollforward.model.moe import moe
from rollforward.model.numerics import Numerics
from rollforward.model.rope import rope_table
from rollforward.model.transformer import Model, Transformer, packed_batch
from rollforward.model.weights import published_tensors
from tests.helpers.bits import relative_error
from tests.helpers.oracle import Oracle
from tests.helpers.tiny import oracle_config, random_params, random_tokens

TOLERANCE = 1e-5
EQUAL_CODES = 0.999
SCORE_GAP = 1e-4
LENGTH = 300


# Quantisers of the specification, in plain torch and independent of kernels/quant.


def power_of_two_scale(amax: Tensor, largest: float) -> Tensor:
    """Return 2^ceil(log2(amax / largest)) exactly, from the float64 exponent."""
    mantissa, exponent = torch.frexp(amax.double() / largest)
    return torch.ldexp(torch.ones_like(mantissa), torch.where(mantissa == 0.5, exponent - 1, exponent))


def fp8_scales(x: Tensor, group: int) -> Tensor:
    """Scale of every element: groups along the last dim, amax floor 1e-4."""
    scales = [
        power_of_two_scale(part.abs().amax(-1, keepdim=True).clamp_min(1e-4), 448.0).expand(part.shape)
        for part in x.split(group, dim=-1)
    ]
    return torch.cat(scales, -1)


def fp8_codes(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 codes in value order, integers."""
    raw = (x.double() / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).view(torch.uint8).int()
    return torch.where(raw >= 128, -(raw & 127), raw)


def fp4_scales(x: Tensor) -> Tensor:
    """Scale of every element: groups of 32, amax floor 6 * 2^-126."""
    groups = x.unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126)
    return power_of_two_scale(amax, 6.0).expand(groups.shape).flatten(-2)


def fp4_codes(x: Tensor, scale: Tensor) -> Tensor:
    """E2M1 codes in value order: nearest, ties to the even code, saturating."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    distance = ((x.double() / scale).abs().clamp(max=6).unsqueeze(-1) - magnitudes).abs()
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # even codes first, so that argmin gives them a tie
    code = order[distance[..., order].argmin(-1)]
    return torch.where(x < 0, -code, code).int()


def bf16_codes(x: Tensor) -> Tensor:
    """BF16 codes in value order."""
    raw = x.to(torch.bfloat16).view(torch.int16).int()
    return torch.where(raw < 0, -(raw & 0x7FFF), raw)


def hadamard_matrix(size: int) -> Tensor:
    """Sylvester's matrix, normalised."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * size**-0.5


class Codes:
    """Equal and off-by-one codes of one test, added up; anything further away fails at once."""

    def __init__(self) -> None:
        self.total = 0
        self.unequal = 0

    def add(self, name: str, ours: Tensor, expected: Tensor) -> None:
        distance = (ours - expected).abs()
        assert not bool((distance > 1).any()), f"{name}: {int((distance > 1).sum())} codes are more than one away"
        self.total += distance.numel()
        self.unequal += int((distance > 0).sum())

    def add_bf16(self, name: str, ours: Tensor, expected: Tensor) -> None:
        """BF16 has codes down to 1e-38: near zero the tolerance before the quantiser spans many of them."""
        assert torch.equal(ours, ours.to(torch.bfloat16).float()), f"{name}: a value is not in BF16"
        rounded = expected.to(torch.bfloat16).float()
        within = (ours - rounded).abs() <= TOLERANCE * expected.abs().max()
        self.unequal += int((within & (ours != rounded)).sum())
        self.total += int(within.sum())
        self.add(name, bf16_codes(ours)[~within], bf16_codes(rounded)[~within])

    def check(self) -> None:
        assert self.total > 1000
        assert self.unequal <= (1 - EQUAL_CODES) * self.total, (self.unequal, self.total)


@dataclass(frozen=True)
class RecordingNumerics(Numerics):
    """Keeps what goes into every quantiser and what comes out."""

    calls: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def _record(self, name: str, before: Tensor, after: Tensor) -> Tensor:
        self.calls.append((name, before.detach().clone(), after.detach().clone()))
        return after

    def gemm_input(self, x_TK: Tensor) -> Tensor:
        return self._record("gemm_input", x_TK, super().gemm_input(x_TK))

    def kv_entry(self, kv_Td: Tensor, rotary_dim: int) -> Tensor:
        return self._record("kv_entry", kv_Td, super().kv_entry(kv_Td, rotary_dim))

    def index_vector(self, x: Tensor) -> Tensor:
        return self._record("index_vector", x, super().index_vector(x))

    def index_score(self, score_GQS: Tensor) -> Tensor:
        return self._record("index_score", score_GQS, super().index_score(score_GQS))

    def take(self, name: str) -> tuple[Tensor, Tensor]:
        """The next call, which must be of that quantiser."""
        got, before, after = self.calls.pop(0)
        assert got == name, f"{got} was called where {name} is due"
        return before, after


@dataclass(frozen=True)
class Case:
    """Our native model, the oracle with the published weights, and every layer's inputs in the oracle."""

    ours: Model
    oracle: Oracle
    token_T: Tensor
    attention_inputs: list[Tensor]
    moe_inputs: list[Tensor]


@pytest.fixture(scope="module", params=["flash", "pro", "other"])
def case(request) -> Case:
    config = oracle_config(request.param)
    params = random_params(config)
    ours = Model(config, params, precision="native")
    oracle = Oracle(config, published_tensors(config, params))
    inputs: dict[str, Tensor] = {}
    hooks = []
    for index in range(config.num_hidden_layers):
        layer = oracle.layer(index)
        for name, module in (("attention", layer.self_attn), ("moe", layer.mlp)):

            def keep(_module, args, kwargs, key=f"{name}{index}"):
                inputs[key] = (args[0] if args else kwargs["hidden_states"])[0]

            hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    token_T = random_tokens(config, (LENGTH,))
    oracle.logits(token_T[None])
    for hook in hooks:
        hook.remove()
    layers = range(config.num_hidden_layers)
    return Case(ours, oracle, token_T, [inputs[f"attention{i}"] for i in layers], [inputs[f"moe{i}"] for i in layers])


def check_fp8(codes: Codes, name: str, pair: tuple[Tensor, Tensor], expected: Tensor, group: int = 128) -> Tensor:
    """Compare a GEMM input or KV part before and after its quantiser; return ours after it."""
    before, after = pair
    assert relative_error(before, expected) <= TOLERANCE, name
    scale = fp8_scales(expected, group)
    ours = fp8_codes(after, scale)
    value = ours.abs().to(torch.uint8).view(torch.float8_e4m3fn).double() * ours.sign() * scale
    assert torch.equal(value, after.double()), f"{name}: a value is no E4M3 code of its group's scale"
    codes.add(name, ours, fp8_codes(expected, scale))
    return after


def check_kv(codes: Codes, name: str, pair: tuple[Tensor, Tensor], expected: Tensor, rotary: int) -> Tensor:
    before, after = pair
    assert relative_error(before, expected) <= TOLERANCE, name
    check_fp8(codes, name, (before[:, :-rotary], after[:, :-rotary]), expected[:, :-rotary], group=64)
    codes.add_bf16(f"{name} rotary", after[:, -rotary:], expected[:, -rotary:])
    return after


def check_fp4(codes: Codes, name: str, pair: tuple[Tensor, Tensor], expected: Tensor) -> Tensor:
    """Compare an indexer vector before the Hadamard rotation and after FP4; return ours after it."""
    before, after = pair
    assert relative_error(before, expected) <= TOLERANCE, name
    rotated = expected.double() @ hadamard_matrix(expected.shape[-1])
    scale = fp4_scales(rotated)
    codes.add(name, fp4_codes(after, scale), fp4_codes(rotated, scale))
    magnitude = (after.double() / scale).abs()
    assert bool(torch.isin(magnitude, torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)).all()), name
    return after


def rotary_tables(oracle: Oracle, x_TD: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    position = torch.arange(LENGTH)[None]
    return oracle.model.model.rotary_emb(x_TD[None], position_ids=position, layer_type=kind)


def rotate(oracle: Oracle, x_TNd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return oracle.modeling.apply_rotary_pos_emb(x_TNd[None], cos, sin, unsqueeze_dim=2)[0]


def window_mask(window: int) -> Tensor:
    position = torch.arange(LENGTH)
    distance = position[:, None] - position
    return (distance >= 0) & (distance < window)


def run_attention(case: Case, layer: int, monkeypatch: pytest.MonkeyPatch) -> tuple[RecordingNumerics, list, Tensor]:
    """Run our layer on the oracle's input; return its quantiser calls, its selections and its output."""
    config = case.ours.config
    numerics, selections = RecordingNumerics("native"), []

    def select(*args, **kwargs):
        selections.append(select_entries(*args, **kwargs))
        return selections[-1]

    select_entries = attention_module.select_entries
    monkeypatch.setattr(attention_module, "select_entries", select)
    tables = {kind: rope_table(config, compressed=kind) for kind in (False, True)}
    context = AttentionContext(config, numerics, tables, packed_batch(config, [LENGTH]), None)
    weights = case.ours.weights.blocks[layer].attn
    return numerics, selections, attention(weights, case.attention_inputs[layer], layer, context)


def check_compressor(case: Case, codes: Codes, layer: int, latent: Tensor, numerics: RecordingNumerics):
    """Compare the entries and return ours; for CSA also (our rounded scores, the oracle's scores, visibility)."""
    config = case.ours.config
    compressor = case.oracle.layer(layer).self_attn.compressor
    captured = []
    if config.layer_kind(layer) == "csa":
        hook = compressor.indexer.scorer.register_forward_pre_hook(lambda _module, args: captured.append(args))
    x_BTD = case.attention_inputs[layer][None]
    entries = compressor(x_BTD, latent[None], torch.arange(LENGTH)[None], None, layer)[0][0, 0]
    ours = check_kv(codes, "entries", numerics.take("kv_entry"), entries, config.qk_rope_head_dim)
    if not captured:
        return ours, None
    hook.remove()
    oracle_q, oracle_k = captured[0][0][0], captured[0][1][0]
    num_entries = oracle_k.shape[0]
    keys = check_fp4(codes, "index keys", numerics.take("index_vector"), oracle_k)
    queries = check_fp4(codes, "index queries", numerics.take("index_vector"), oracle_q)
    scores, rounded = (ungroup(part)[:, :num_entries] for part in numerics.take("index_score"))
    expected = compressor.indexer.scorer(queries[None], keys[None], x_BTD)[0]
    visible = (torch.arange(num_entries) + 1) * config.compress_ratios[layer] - 1 <= torch.arange(LENGTH)[:, None]
    assert relative_error(scores[visible], expected[visible]) <= TOLERANCE
    codes.add_bf16("index scores", rounded[visible], expected[visible])
    return ours, (rounded, expected, visible)


def ungroup(x_GQS: Tensor) -> Tensor:
    """Lay groups of 64 queries flat: [G, 64, S] -> [LENGTH, S]."""
    return x_GQS.flatten(0, 1)[:LENGTH]


def stable_choice(score_TS: Tensor, visible_TS: Tensor, k: int) -> Tensor:
    """The k best visible entries of every query by a stable sort, as a mask."""
    order = torch.sort(score_TS.masked_fill(~visible_TS, -torch.inf), dim=1, descending=True, stable=True).indices
    return torch.zeros_like(visible_TS).scatter_(1, order[:, :k], True) & visible_TS


def check_selection(k: int, chosen: Tensor, scored: tuple[Tensor, Tensor, Tensor]) -> None:
    """Ours is the top-k of our rounded scores, and of the oracle's wherever those leave a gap."""
    ours, expected, visible = scored
    assert torch.equal(chosen, stable_choice(ours, visible, k))
    rounded = expected.to(torch.bfloat16).float()
    has_rest = visible.sum(1) > k
    edge = torch.sort(rounded.masked_fill(~visible, -torch.inf), dim=1, descending=True).values[:, k - 1 : k + 1]
    clear = ~has_rest | (edge[:, 0] - edge[:, 1] > SCORE_GAP)
    assert int((clear & has_rest).sum()) > LENGTH // 2, "the comparison is empty"
    assert torch.equal(chosen[clear], stable_choice(rounded, visible, k)[clear])


@torch.no_grad()
def check_attention(case: Case, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, oracle = case.ours.config, case.oracle
    x_TD, module, codes = case.attention_inputs[layer], oracle.layer(layer).self_attn, Codes()
    kind = "main" if config.layer_kind(layer) == "window" else "compress"
    cos, sin = rotary_tables(oracle, x_TD, kind)
    numerics, selections, output = run_attention(case, layer, monkeypatch)

    x_quantised = check_fp8(codes, "x", numerics.take("gemm_input"), x_TD)
    latent = check_fp8(codes, "latent", numerics.take("gemm_input"), module.q_a_norm(module.q_a_proj(x_quantised)))
    q_TNd = module.q_b_norm(module.q_b_proj(latent).view(LENGTH, config.num_attention_heads, config.head_dim))
    q_TNd = rotate(oracle, q_TNd, cos, sin)
    window = rotate(oracle, module.kv_norm(module.kv_proj(x_quantised)).unsqueeze(1), cos, sin)[:, 0]
    keys = check_kv(codes, "window", numerics.take("kv_entry"), window, config.qk_rope_head_dim)
    visible = window_mask(config.sliding_window)

    if module.compressor is not None:
        entries, scored = check_compressor(case, codes, layer, latent, numerics)
        num_entries = entries.shape[0]
        if scored is None:
            last = (torch.arange(num_entries) + 1) * config.compress_ratios[layer] - 1
            entry_visible = last <= torch.arange(LENGTH)[:, None]
        else:
            entry_visible = ungroup(selections[0])[:, :num_entries]
            assert not bool(ungroup(selections[0])[:, num_entries:].any())
            check_selection(config.index_topk, entry_visible, scored)
        keys, visible = torch.cat((keys, entries)), torch.cat((visible, entry_visible), 1)

    # transformers' own attention function on our quantised keys and our selection.
    bias = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[None, None]
    attended, _ = oracle.modeling.eager_attention_forward(
        module, q_TNd.transpose(0, 1)[None], keys[None, None], keys[None, None], bias, scaling=module.scaling
    )
    attended = rotate(oracle, attended[0], cos, -sin)
    grouped = module.o_a_proj(attended.reshape(1, LENGTH, config.o_groups, -1)).flatten(2)[0]
    o_quantised = check_fp8(codes, "o", numerics.take("gemm_input"), grouped)
    assert relative_error(output, module.o_b_proj(o_quantised)) <= TOLERANCE
    assert not numerics.calls
    codes.check()


@torch.no_grad()
def check_moe(case: Case, layer: int) -> None:
    config = case.ours.config
    x_TD, module, codes = case.moe_inputs[layer], case.oracle.layer(layer).mlp, Codes()
    numerics = RecordingNumerics("native")
    output = moe(case.ours.weights.blocks[layer].ffn, x_TD, case.token_T, config, numerics)
    gate_args = (x_TD[None], case.token_T[None]) if module.is_hash else (x_TD[None],)
    _, weights_TK, experts_TK = module.gate(*gate_args)

    x_quantised = check_fp8(codes, "x", numerics.take("gemm_input"), x_TD)
    inner, inner_quantised = numerics.take("gemm_input")
    routed = torch.zeros_like(x_TD)
    row = 0
    for expert in range(config.n_routed_experts):  # our rows: by expert, then token, whole tiles of 16
        token_R, slot_R = torch.where(experts_TK == expert)
        rows = slice(row, row + len(token_R))
        gate_up = x_quantised[token_R] @ module.experts.gate_up_proj[expert].t()
        expected = module.experts._apply_gate(gate_up) * weights_TK[token_R, slot_R, None]
        quantised = check_fp8(codes, "inner", (inner[rows], inner_quantised[rows]), expected)
        routed.index_add_(0, token_R, quantised @ module.experts.down_proj[expert].t())
        row += -(-len(token_R) // 16) * 16
    assert row == inner.shape[0]

    shared = module.shared_experts
    shared_x = check_fp8(codes, "shared x", numerics.take("gemm_input"), x_TD)
    gate = shared.gate_proj(shared_x).clamp(max=config.swiglu_limit)
    up = shared.up_proj(shared_x).clamp(-config.swiglu_limit, config.swiglu_limit)
    shared_inner = check_fp8(codes, "shared inner", numerics.take("gemm_input"), shared.act_fn(gate) * up)
    assert relative_error(output, routed + shared.down_proj(shared_inner)) <= TOLERANCE
    assert not numerics.calls
    codes.check()


def test_attention_of_every_layer(case, monkeypatch):
    for layer in range(case.ours.config.num_hidden_layers):
        with monkeypatch.context() as patch:
            check_attention(case, layer, patch)


def test_moe_of_every_layer(case):
    for layer in range(case.ours.config.num_hidden_layers):
        check_moe(case, layer)


@torch.no_grad()
def test_mtp_projections(case):
    # The module's block is one more window layer; its two projections have quantised inputs of their own.
    config, oracle, codes = case.ours.config, case.oracle, Codes()
    streams_TMD = oracle.streams(case.token_T[None])[0, :-1]
    next_T, numerics = case.token_T[1:], RecordingNumerics("native")
    transformer = Transformer(config, "native")
    transformer.numerics = numerics
    transformer.mtp_streams(case.ours.weights, streams_TMD, next_T, packed_batch(config, [LENGTH - 1]))

    def norm(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), oracle.mtp[name], config.rms_norm_eps)

    embedded = norm(oracle.model.model.embed_tokens(next_T), "enorm")
    check_fp8(codes, "embedding", numerics.take("gemm_input"), embedded)
    check_fp8(codes, "streams", numerics.take("gemm_input"), norm(streams_TMD, "hnorm").flatten(0, 1))
    codes.check()


def test_quantisers_of_this_file_give_the_vectors_of_the_specification():
    x = torch.zeros(1, 64)
    x[0, :4] = torch.tensor([1.0, -0.3, 0.017, 2.7])
    scale = fp8_scales(x, 64)
    assert scale[0, 0] == 2.0**-7
    code = fp8_codes(x, scale)[0, :4]
    values = code.abs().to(torch.uint8).view(torch.float8_e4m3fn).float() * code.sign() * 2.0**-7
    assert values.tolist() == [1.0, -0.3125, 0.017578125, 2.75]
    y = torch.zeros(1, 32)
    y[0, :4] = torch.tensor([1.0, -0.3, 0.25, 2.7])
    assert fp4_scales(y)[0, 0] == 0.5
    assert fp4_codes(y, fp4_scales(y))[0, :4].tolist() == [4, -1, 1, 7]
