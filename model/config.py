"""Hyper-parameters of a DeepSeek-V4 model, named as in the official `config.json`, checked once when they are made.

What lives here: `ModelConfig`, its reader and writer. What does not: the numbers of the presets (`presets.py`), number
formats and block sizes (`kernels/quant/formats.py`), tensor shapes (`shapes.py`).
This module imports neither torch nor ray.
"""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rollforward.model.errors import ConfigError, UnsupportedVariantError
from rollforward.model.presets import PRESETS, PresetName

LayerKind = Literal["window", "csa", "hca"]
"""window: sliding window only; csa: plus top-k of lightly compressed entries; hca: plus all heavily compressed ones."""

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
"""A size: at least one; the bound keeps absurd files from allocating."""

LayerCount = Annotated[int, msgspec.Meta(ge=1, le=4096)]
"""How many layers or experts: each has tensors of its own."""

Index = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
"""A count that may be zero, or an id."""

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e30)]
"""A finite real number above zero."""


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """YaRN parameters of the layers that have a compressor."""

    type: Literal["yarn"] = "yarn"
    """Only YaRN is defined."""
    factor: Positive
    """Division of the low frequencies."""
    beta_fast: Positive = 32.0
    """Rotations over the original length above which a frequency stays as it is."""
    beta_slow: Positive = 1.0
    """Rotations below which a frequency is divided by `factor`."""
    original_max_position_embeddings: Count
    """Length, in tokens, that the ramp refers to."""


class CompressRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens per compressed entry of the two compressed layer kinds (transformers' spelling)."""

    compressed_sparse_attention: Count = 4
    """Ratio of CSA layers."""
    heavily_compressed_attention: Count = 128
    """Ratio of HCA layers."""


class QuantizationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The format of dense weights; one combination exists."""

    quant_method: Literal["fp8"] = "fp8"
    """Dense matrices are FP8."""
    fmt: Literal["e4m3"] = "e4m3"
    """Element format."""
    scale_fmt: Literal["ue8m0"] = "ue8m0"
    """Scales are powers of two, one byte each."""
    activation_scheme: Literal["dynamic"] = "dynamic"
    """Activation scales are made on the fly."""
    weight_block_size: tuple[int, int] = (128, 128)
    """Rows and columns that share a scale."""

    def __post_init__(self) -> None:
        """Refuse another block size."""
        if self.weight_block_size != (128, 128):
            raise ConfigError(
                f"quantization_config.weight_block_size is {list(self.weight_block_size)}; the FP8 formats here have "
                "blocks of [128, 128]. Other sizes belong to other architectures (V4.1: [32, 32])."
            )


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model's hyper-parameters; construction checks every rule between fields."""

    vocab_size: Count
    """V, entries of the embedding and of the head."""
    hidden_size: Count
    """D."""
    num_hidden_layers: LayerCount
    """Blocks of the trunk, without MTP."""
    num_attention_heads: Count
    """N, query heads."""
    num_key_value_heads: Count = 1
    """Always 1: one shared vector is key and value."""
    head_dim: Count
    """H, of which the last qk_rope_head_dim are rotary."""
    qk_rope_head_dim: Count
    """Rotary dimensions of a head."""
    q_lora_rank: Count
    """Width of the query latent."""
    o_groups: Count
    """Groups of heads in the output projection."""
    o_lora_rank: Count
    """Width of each group's output latent."""
    moe_intermediate_size: Count
    """F, hidden width of an expert; of the shared expert too."""
    n_routed_experts: LayerCount
    """E."""
    n_shared_experts: Count = 1
    """Always 1."""
    num_experts_per_tok: Count
    """K, routed experts of a token."""
    num_hash_layers: Index
    """First layers, whose experts are looked up by token id."""
    scoring_func: Literal["sqrtsoftplus"] = "sqrtsoftplus"
    """Gate score: sqrt(softplus(logit))."""
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    """Selection by score plus a bias that has no part in the weights."""
    norm_topk_prob: bool = True
    """Always true: the weights of a token sum to routed_scaling_factor."""
    routed_scaling_factor: Positive
    """Sum of a token's expert weights."""
    swiglu_limit: Positive = 10.0
    """Clamp of SwiGLU's two inputs."""
    sliding_window: Count
    """W, raw tokens that a query sees, itself included."""
    compress_ratios: tuple[int, ...]
    """Tokens per compressed entry by layer, MTP last; 0 = window only."""
    compress_rates: CompressRates = CompressRates()
    """Which ratio means CSA and which HCA."""
    index_n_heads: Count
    """Heads of the indexer."""
    index_head_dim: Count
    """Width of an indexer head."""
    index_topk: Count
    """S, entries that a CSA query picks."""
    hc_mult: Count = 4
    """M, residual streams."""
    hc_sinkhorn_iters: Count = 20
    """Row and column normalisations of the stream mixing."""
    hc_eps: Positive = 1e-6
    """Added in the stream mixing."""
    rms_norm_eps: Positive = 1e-6
    """Added to every mean square."""
    rope_theta: Positive = 10000.0
    """Rotary base of window-only layers and MTP."""
    compress_rope_theta: Positive = 160000.0
    """Rotary base of layers with a compressor."""
    rope_scaling: RopeScaling | None = None
    """YaRN, in layers with a compressor only; None = plain frequencies."""
    max_position_embeddings: Count
    """Longest sequence, in tokens."""
    num_nextn_predict_layers: Annotated[int, msgspec.Meta(ge=0, le=1)] = 1
    """MTP modules: 0 or 1."""
    bos_token_id: Index = 0
    """Begins a conversation."""
    eos_token_id: Index = 1
    """Ends an assistant's message."""
    tie_word_embeddings: bool = False
    """Always false."""
    initializer_range: Positive = 0.02
    """Standard deviation of fresh matrices."""
    expert_dtype: Literal["fp4", "fp8"] = "fp4"
    """Published format of routed experts."""
    quantization_config: QuantizationConfig = QuantizationConfig()
    """Published format of dense matrices."""

    def __post_init__(self) -> None:
        """Check the rules between fields."""
        self._check_fixed()
        self._check_widths()
        self._check_layers()

    def _require(self, holds: bool, field: str, rule: str) -> None:
        _require(holds, field, getattr(self, field), rule)

    def _check_fixed(self) -> None:
        fixed = {"num_key_value_heads": 1, "n_shared_experts": 1, "norm_topk_prob": True, "tie_word_embeddings": False}
        for name, only in fixed.items():
            self._require(
                getattr(self, name) == only, name, f"DeepSeek-V4 is defined for {only} only. Set it to {only}."
            )

    def _check_widths(self) -> None:
        require, rope, index_width = self._require, self.qk_rope_head_dim, self.index_head_dim
        require(rope % 2 == 0, "qk_rope_head_dim", "rotary dimensions come in pairs. Use an even number.")
        require(
            rope < self.head_dim, "qk_rope_head_dim", f"it must be below head_dim = {self.head_dim}. Use wider heads."
        )
        heads = self.num_attention_heads
        require(heads % self.o_groups == 0, "o_groups", f"it must divide num_attention_heads = {heads}. Use a divisor.")
        rule = "the Hadamard rotation and groups of 32 need a power of two >= 32. Use 32, 64 or 128."
        require(index_width & (index_width - 1) == 0 and index_width >= 32, "index_head_dim", rule)
        rule = f"its last qk_rope_head_dim = {rope} dimensions are rotary. Use a wider index head."
        require(index_width >= rope, "index_head_dim", rule)
        for name in ("hidden_size", "moe_intermediate_size"):
            rule = "expert weights have groups of 32 along it. Use a multiple of 32."
            require(getattr(self, name) % 32 == 0, name, rule)
        experts = self.n_routed_experts
        rule = f"there are n_routed_experts = {experts}. Choose fewer."
        require(self.num_experts_per_tok <= experts, "num_experts_per_tok", rule)
        for name in ("bos_token_id", "eos_token_id"):
            rule = f"it must be below vocab_size = {self.vocab_size}. Use an id of the tokenizer."
            require(getattr(self, name) < self.vocab_size, name, rule)

    def _check_layers(self) -> None:
        csa, hca = self.compress_rates.compressed_sparse_attention, self.compress_rates.heavily_compressed_attention
        self._require(1 < csa != hca > 1, "compress_rates", "the ratios must differ and be above 1. Use 4 and 128.")
        layers, ratios, expected = self.num_hidden_layers, self.compress_ratios, self.num_layers_with_mtp
        rule = (
            f"it needs num_hidden_layers + num_nextn_predict_layers = {expected} entries, MTP last. Add or drop some."
        )
        _require(len(ratios) == expected, "compress_ratios", f"a list of {len(ratios)}", rule)
        rule = (
            f"an entry is 0 (window only), {csa} (CSA) or {hca} (HCA). "
            "Change it, or compress_rates if this model has other ratios."
        )
        for layer, ratio in enumerate(ratios):
            _require(ratio in (0, csa, hca), f"compress_ratios[{layer}]", ratio, rule)
        for layer in range(layers, expected):
            rule = "the MTP layer is window only. Set it to 0."
            _require(ratios[layer] == 0, f"compress_ratios[{layer}]", ratios[layer], rule)
        self._require(self.num_hash_layers <= layers, "num_hash_layers", f"there are {layers} layers. Choose fewer.")

    @property
    def nope_head_dim(self) -> int:
        """Dimensions of a head that are not rotary; the ones that the KV cache keeps in FP8."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def num_layers_with_mtp(self) -> int:
        """Blocks of the trunk plus MTP modules."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def layer_kind(self, layer: int) -> LayerKind:
        """Return the kind of layer `layer`, counted from 0; the MTP module is layer num_hidden_layers."""
        ratio = self.compress_ratios[layer]
        if ratio == 0:
            return "window"
        return "csa" if ratio == self.compress_rates.compressed_sparse_attention else "hca"

    def is_hash_layer(self, layer: int) -> bool:
        """Return whether layer `layer` looks its experts up by token id instead of scoring them."""
        return layer < self.num_hash_layers


def _require(holds: bool, field: str, value: object, rule: str) -> None:
    """Raise a ConfigError of field, value, and the rule with its way out."""
    if not holds:
        raise ConfigError(f"{field} is {value!r}; {rule}")


_FIXED_KEYS: dict[str, object] = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
}
"""Keys of config.json that have one admissible value here; written back, never stored."""

_IGNORED_KEYS = frozenset(
    {"transformers_version", "use_cache", "torch_dtype", "dtype", "pad_token_id", "_name_or_path", "auto_map"}
    | {"return_dict", "output_hidden_states", "output_attentions", "router_aux_loss_coef", "output_router_logits"}
)
"""Keys of config.json that say nothing about the computation."""

_TRANSFORMERS_KEYS = frozenset({"layer_types", "mlp_layer_types", "rope_parameters", "partial_rotary_factor"})
"""Derived spellings that transformers writes; the official ones are needed."""

_VARIANT_KEYS = {
    "dspark_": "V4-Flash-0731 / V4-Pro-0813: a three-stage DSpark drafter stands where MTP was",
    "n_mtp_layers": "V4-Flash-0731 / V4-Pro-0813: a three-stage DSpark drafter stands where MTP was",
    "engram": "V4.1: another architecture (engram tables, ratios 2/1, 32x32 blocks)",
    "vision": "V4-Flash-Vision-Exp: it routes image tokens with a second gate bias",
    "image_": "V4-Flash-Vision-Exp: it routes image tokens with a second gate bias",
}
"""Beginnings of keys that only a relative of the model has -> which one and why it is refused."""


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Build a ModelConfig from the contents of an official `config.json`.

    Args:
        raw: the decoded JSON object. Keys without influence on the computation are on an explicit list and dropped.

    Returns:
        The checked configuration.

    Raises:
        UnsupportedVariantError: a key or value that only a relative of V4 has (DSpark, V4.1, Vision).
        ConfigError: an unknown key (with the nearest valid one), a wrong type, a missing key, a broken rule.
    """
    _refuse_variants(raw)
    known = ModelConfig.__struct_fields__
    fields: dict[str, Any] = {}
    for key, value in raw.items():
        if key in known:
            fields[key] = value
        elif key in _FIXED_KEYS:
            only = _FIXED_KEYS[key]
            _require(value == only, key, value, f"DeepSeek-V4 is defined for {only!r} only. Set it to {only!r}.")
        elif key in _TRANSFORMERS_KEYS:
            raise ConfigError(
                f"{key} is transformers' spelling; the official config.json has compress_ratios, num_hash_layers, "
                "rope_theta, compress_rope_theta and rope_scaling. Convert the checkpoint: "
                "rollforward convert from=DIR to=NEW_DIR"
            )
        elif key not in _IGNORED_KEYS:
            near = get_close_matches(key, [*known, *_FIXED_KEYS], n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]}?" if near else "Remove it if it does not change the computation."
            raise ConfigError(f"{key} is no field of a DeepSeek-V4 config.json. {hint}")
    fields["rope_scaling"] = _official_rope_scaling(raw.get("rope_scaling"), raw)
    # None stands for an absent value in files that transformers rewrote.
    for key in ("quantization_config", "expert_dtype"):
        if fields.get(key) is None:
            fields.pop(key, None)
    try:
        return msgspec.convert(fields, ModelConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: {error}. Compare it with the official file.") from error


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    for key in raw:
        for beginning, reason in _VARIANT_KEYS.items():
            if key.startswith(beginning):
                raise UnsupportedVariantError(f"{key}: this is {reason}. Use a V4-Flash or V4-Pro checkpoint.")
    model_type = raw.get("model_type", "deepseek_v4")
    if isinstance(model_type, str) and model_type != "deepseek_v4" and model_type.startswith("deepseek_v4"):
        raise UnsupportedVariantError(
            f"model_type is {model_type!r}, a relative of deepseek_v4 with another architecture. "
            "Use a V4-Flash or V4-Pro checkpoint."
        )


def _official_rope_scaling(scaling: object, raw: Mapping[str, Any]) -> object:
    """Drop the two keys that transformers adds to rope_scaling, if they agree with the official ones."""
    if not isinstance(scaling, Mapping):
        return scaling
    kept = dict(scaling)
    rope_type = kept.pop("rope_type", None)
    if rope_type is not None:
        kept.setdefault("type", rope_type)
        _require(kept["type"] == rope_type, "rope_scaling.rope_type", rope_type, "it must equal type. Remove it.")
    theta = kept.pop("rope_theta", None)
    if theta is not None:
        main = raw.get("rope_theta", theta)
        _require(theta == main, "rope_scaling.rope_theta", theta, f"it must equal rope_theta = {main!r}. Remove it.")
    return kept


def load_model_config(path: Path) -> ModelConfig:
    """Read a model's configuration.

    Args:
        path: a config.json, or the folder that holds one.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: the file is absent, is not a JSON object, is a run's, or `parse_model_config` refuses it; names the
            file.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}. Give a config.json or its folder.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}. Fetch it again.") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} holds a {type(raw).__name__}; a config.json is an object. Fetch it again.")
    if "run_dir" in raw:
        raise ConfigError(
            f"{file} holds the settings of a run, not of a model. The model that a run has made lies below it: name"
            f" {file.parent / 'model'}."
        )
    try:
        return parse_model_config(raw)
    except UnsupportedVariantError as error:
        raise UnsupportedVariantError(f"{file}: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the official `config.json` object; `parse_model_config` of it gives an equal configuration."""
    raw = {**_FIXED_KEYS, **msgspec.to_builtins(config), "torch_dtype": "bfloat16"}
    if config.compress_rates == CompressRates():
        del raw["compress_rates"]
    return raw


def preset(name: PresetName) -> ModelConfig:
    """Return a known model's configuration.

    Args:
        name: flash and pro are the released models; mini is Flash for one GPU; tiny has every layer kind and learns on
            two CPU cores.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise ConfigError(f"model is {name!r}; presets are {known}. Use one of them or a folder with a config.json.")
    return msgspec.convert(PRESETS[name], ModelConfig)


def resolve_model(name_or_folder: str) -> ModelConfig:
    """Return a preset by name, or the configuration of a folder (or file) on disk.

    Args:
        name_or_folder: flash, pro, mini, tiny, or a path.

    Raises:
        ConfigError: it is neither, or the file is refused.
    """
    for name in PRESETS:
        if name == name_or_folder:
            return preset(name)
    path = Path(name_or_folder)
    if not path.exists():
        near = get_close_matches(name_or_folder, PRESETS, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]}?" if near else "Use one of them or a folder with a config.json."
        raise ConfigError(
            f"model is {name_or_folder!r}; it is no path here and the presets are {', '.join(PRESETS)}. {hint}"
        )
    return load_model_config(path)
