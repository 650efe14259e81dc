"""YAML and overrides to a frozen, validated configuration: Hydra composes, msgspec decodes into the class it is given.

The only importer of hydra and omegaconf, and the only place that touches the process's environment.
Schema classes live beside what they configure, verbs and recipes in conf/jobs.py and conf/recipe.py.
"""

import functools
import json
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rollforward.conf.errors import ConfigError, first_line
from rollforward.conf.schema import (
    Step,
    dotted_key,
    field_at,
    has_parts,
    nearest,
    schema_fields,
    unknown_keys,
    value_at,
)

__all__ = [
    "CONFIG_DIR",
    "LIBRARY_ENVIRONMENT",
    "compose_data",
    "config_groups",
    "decode",
    "is_ray_job",
    "is_ray_job_with_files",
    "library_environment",
    "load_config",
    "plain_settings",
    "read_yaml",
    "set_api_address",
    "set_library_environment",
    "to_yaml",
    "write_resolved",
]

CONFIG_DIR: Path = Path(__file__).resolve().parent
"""Where the shipped YAML lies: one root per verb, one folder per group."""

_Schema = TypeVar("_Schema", bound=msgspec.Struct)
_RUN_GROUP = "_run"
_HYDRA_LETS_THROUGH = (AssertionError, AttributeError, KeyError, RecursionError, TypeError, ValueError)
"""What Hydra raises, untranslated, on overrides that it did not expect: a number in place of a group's option."""


LIBRARY_ENVIRONMENT: Mapping[str, str] = {
    # Threads that wait sleep instead of spinning: on a shared machine spinning costs a multiple of the work itself.
    "OMP_WAIT_POLICY": "PASSIVE",
    # DeepSpeed looks for an accelerator and warns; this version computes on the CPU.
    "DS_ACCELERATOR": "cpu",
    # DeepSpeed asks for it in every process; ranks of one machine are told apart by the process group.
    "LOCAL_RANK": "0",
    # What a local cluster of Ray's does anyway, with a warning when it is not said: its processes show a token.
    "RAY_AUTH_MODE": "token",
}
"""Variables that libraries read when they are imported and take no argument for; what the user has set is kept."""


def set_library_environment() -> None:
    """Sets LIBRARY_ENVIRONMENT in this process and its children. To be called before torch is imported."""
    for name, value in LIBRARY_ENVIRONMENT.items():
        if name != "RAY_AUTH_MODE" or not is_ray_job():  # a job does as its cluster does
            os.environ.setdefault(name, value)


def library_environment() -> dict[str, str]:
    """What this process has of LIBRARY_ENVIRONMENT, for processes that it starts elsewhere."""
    return {name: os.environ[name] for name in LIBRARY_ENVIRONMENT if name in os.environ}


def is_ray_job() -> bool:
    """Whether this process is the driver of a job that was submitted to a Ray cluster."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def is_ray_job_with_files() -> bool:
    """Whether it is, and a directory was uploaded with the job (`working_dir=`), in which it works."""
    try:
        config = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
    except ValueError:
        return False
    return "working_dir" in (config.get("runtime_env") or {})


def set_api_address(address: str) -> None:
    """Makes Ray's job client use this address, which it otherwise replaces by the environment's."""
    os.environ["RAY_API_SERVER_ADDRESS"] = address


def config_groups(config_dir: Path = CONFIG_DIR) -> dict[str, tuple[str, ...]]:
    """Group name -> its options, for every folder of YAML files but the recipes."""
    folders = sorted({file.parent for file in config_dir.rglob("*.yaml")} - {config_dir, config_dir / "recipe"})
    return {
        folder.relative_to(config_dir).as_posix(): tuple(sorted(file.stem for file in folder.glob("*.yaml")))
        for folder in folders
    }


def read_yaml(path: Path) -> Any:
    """The plain data of one YAML file, with interpolations left as they are written.

    Raises:
        ConfigError: the file is absent or not YAML.
    """
    try:
        return OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} cannot be read: {first_line(error)}") from error
    except RecursionError as error:
        raise ConfigError(
            f"{path} is nested too deep, or an alias lies in its own anchor. Write it flatter."
        ) from error
    except Exception as error:
        if type(error).__module__.split(".")[0] == "yaml":
            raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
        raise


def load_config(
    schema: type[_Schema],
    root: str,
    overrides: Sequence[str] = (),
    *,
    layer: Mapping[str, Any] | None = None,
    run_dirs: Mapping[str, str] | None = None,
    config_dir: Path = CONFIG_DIR,
) -> _Schema:
    """One configuration: the root YAML, then `layer`, then the overrides, decoded into `schema`.

    Args:
        schema: a frozen msgspec.Struct with forbid_unknown_fields; its defaults are the only ones.
        root: name of the root YAML in `config_dir`, without suffix.
        overrides: Hydra's syntax (`algo.group_size=8`, `algo=gspo`). A key need not be in the YAML: the schema decides.
        layer: settings between the YAML and the overrides, written like a YAML file (may have a `defaults` list). An
            override that chooses a group's file (`algo=gspo`) takes the place of what the layer says of that group.
        run_dirs: run name -> directory, for `${run_dir:NAME}` in `layer`.
        config_dir: where root and groups lie.

    Raises:
        ConfigError: anything a user can mistype; names the key, the value, the rule and the way out.

    Invariants: pure but for reading YAML; two equal calls return equal values.
    """
    return decode(
        schema, compose_data(root, overrides, layer=layer, run_dirs=run_dirs, config_dir=config_dir, schema=schema)
    )


def compose_data(
    root: str,
    overrides: Sequence[str] = (),
    *,
    layer: Mapping[str, Any] | None = None,
    run_dirs: Mapping[str, str] | None = None,
    config_dir: Path = CONFIG_DIR,
    schema: type[msgspec.Struct] | None = None,
) -> dict[str, Any]:
    """The composed, resolved plain data, not yet decoded; arguments and errors as in `load_config`."""
    groups = config_groups(config_dir)
    parsed = _parse(overrides)
    arguments = [_as_hydra(override, groups, schema) for override in parsed]
    if layer is not None:
        chosen = {override.key_or_group for override in parsed if override.key_or_group in groups}
        node = {key: value for key, value in layer.items() if key not in chosen}
        ConfigStore.instance().store(name="layer", group=_RUN_GROUP, node=node, package="_global_")
        arguments.insert(0, f"+{_RUN_GROUP}=layer")
    OmegaConf.register_new_resolver("run_dir", functools.partial(_run_dir, dict(run_dirs or {})), replace=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with initialize_config_dir(version_base="1.3", config_dir=str(config_dir)):
                composed = compose(config_name=root, overrides=arguments)
        data = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, *_HYDRA_LETS_THROUGH) as error:
        raise _translated(error, groups) from error
    return cast("dict[str, Any]", data)


def _run_dir(directories: Mapping[str, str], name: str) -> str:
    if name not in directories:
        raise ConfigError(
            f"${{run_dir:{name}}} names no earlier run; earlier runs here: {', '.join(directories) or 'none'}. "
            "Correct the name, or put that run before this one."
        )
    return directories[name]


def _parse(overrides: Sequence[str]) -> list[Override]:
    parsed: list[Override] = []
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            raise ConfigError(
                f"{text!r} is not an override; an override reads key=value, with quotes around a value that holds "
                f"spaces, commas or brackets. Hydra says: {first_line(error)}"
            ) from error
        if not override.key_or_group:
            raise ConfigError(f"{text!r} names no key; an override reads key=value.")
        if override.is_sweep_override():
            raise ConfigError(
                f"{text!r} names several values; one command is one run. Write a list as "
                f"{override.key_or_group}='[a,b]', or call rollforward once per value."
            )
        if override.key_or_group.split(".")[0] == "hydra":
            raise ConfigError(f"{text!r}: Hydra's own settings have no effect here. Leave it out.")
        parsed.append(override)
    return parsed


def plain_settings(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """(dotted key, value) of overrides that set single values; nothing is composed.

    Raises:
        ConfigError: no override, or one that takes a key away.
    """
    settings: list[tuple[str, Any]] = []
    for override in _parse(overrides):
        if override.type is OverrideType.DEL or override.package is not None:
            raise ConfigError(f"{override.input_line!r} sets no value; write key=value.")
        settings.append((override.key_or_group, override.value()))
    return settings


def _as_hydra(override: Override, groups: Mapping[str, tuple[str, ...]], schema: type[msgspec.Struct] | None) -> str:
    """The override as it is given to Hydra: a plain value is set whether or not the YAML mentions its key."""
    text = str(override.input_line)
    key = override.key_or_group
    is_choice = key in groups and isinstance(override.value(), str) and (schema is None or has_parts(schema, key))
    if override.type is not OverrideType.CHANGE or override.package is not None or is_choice:
        return text
    return f"++{text}"


def _translated(error: BaseException, groups: Mapping[str, tuple[str, ...]]) -> ConfigError:
    """A message of Hydra's or OmegaConf's in this project's form."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigError):
            return cause
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    line = first_line(error)
    if found := re.search(r"Could not find '([\w./@-]+)'", text):
        group, _, option = found[1].rpartition("/")
        options = list(groups.get(group, ()))
        near = nearest(option, options)
        return ConfigError(
            f"{group or 'config'}={option}: there is no such file. "
            + (f"Did you mean {group}={near}? " if near else "")
            + (f"Choices of {group}: {', '.join(options)}." if options else "Look into conf/ for the names.")
        )
    if found := re.search(r"Could not override '([\w./@-]+)'", text):
        return ConfigError(
            f"{found[1]}: this command has no such group to choose from; its groups are listed by --help. "
            f"To set a value below it write {found[1].replace('/', '.')}.KEY=VALUE. Hydra says: {line}"
        )
    if found := re.search(r"force-add of config groups is not supported: '\+\+([\w./-]+)=(.*)'", text):
        return ConfigError(
            f"{found[1]}={found[2]}: a choice of {found[1]} has a name: {', '.join(groups.get(found[1], ()))}. To set a"
            f" value below it write {found[1].replace('/', '.')}.KEY=VALUE."
        )
    if found := re.search(r"Missing mandatory value: ([\w.\[\]-]+)", text):
        return ConfigError(f"{found[1]} has no value and needs one. Set {found[1]}=VALUE.")
    if found := re.search(r"Interpolation key '([^']+)' not found", text):
        return ConfigError(f"${{{found[1]}}} refers to a key that is not set. {' '.join(text.split())}")
    return ConfigError(f"the configuration cannot be composed: {' '.join(text.split())}")


def decode(schema: type[_Schema], data: Mapping[str, Any]) -> _Schema:
    """Plain data into `schema`, strictly: no unknown key, no coercion.

    Raises:
        ConfigError: names the dotted key, its value, the rule and the nearest valid key or the default.
    """
    unknown = list(unknown_keys(schema, data))
    if unknown:
        everywhere = [field.path for field in schema_fields(schema)]
        raise ConfigError("\n".join(_unknown_text(key, here, everywhere) for key, here in unknown))
    if (found := _no_number(data)) is not None:
        raise ConfigError(
            f"{found[0]} is {found[1]}; a number is finite and an integer lies within 64 bits. Change it."
        )
    try:
        return msgspec.convert(data, schema)
    except msgspec.ValidationError as error:
        raise ConfigError(_validation_text(schema, data, _named_entry(schema, data, str(error)))) from error


def _named_entry(schema: type[msgspec.Struct], data: Mapping[str, Any], message: str) -> str:
    """The message with the key of the entry at fault, where it is inside a mapping at the top: msgspec says `[...]`."""
    if (found := re.search(r"`\$\.(\w+)\[\.\.\.\]", message)) is None or not isinstance(data.get(found[1]), Mapping):
        return message
    name, entries = found[1], cast("Mapping[str, Any]", data[found[1]])
    for key, value in entries.items():
        try:
            msgspec.convert({**data, name: {key: value}}, schema)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return message.replace(f"{name}[...]", f"{name}.{key}")
    return message


def _no_number(data: object, path: str = "") -> tuple[str, object] | None:
    """(dotted key, value) of the first number that JSON or a 64-bit integer cannot hold."""
    items: list[tuple[str, object]] = []
    if isinstance(data, Mapping):
        mapping = cast("Mapping[object, object]", data)
        items = [(f"{path}.{key}" if path else str(key), value) for key, value in mapping.items()]
    elif isinstance(data, list):
        items = [(f"{path}[{index}]", value) for index, value in enumerate(cast("list[object]", data))]
    elif (isinstance(data, float) and not math.isfinite(data)) or (isinstance(data, int) and data.bit_length() > 63):
        return path, data
    return next((found for key, value in items if (found := _no_number(value, key)) is not None), None)


def _unknown_text(key: str, here: list[str], everywhere: list[str]) -> str:
    if key in everywhere:
        parent = key.rpartition(".")[0]
        return (
            f"{key} is not a setting: it belongs to another choice of {parent}.type. Valid here: {', '.join(here)}."
            f" Remove it (on the command line: '~{_typed(key)}', behind the run's name in a recipe), or choose another"
            " type."
        )
    near = nearest(key, here) or nearest(key, [] if "[" in key else everywhere)
    way_out = f"Did you mean {_typed(near)}?" if near else f"Valid here: {', '.join(here)}."
    return f"{key} is not a setting. {way_out}"


def _typed(key: str) -> str:
    """A key as an override writes it."""
    return re.sub(r"\[(\d+)\]", r".\1", key)


def _validation_text(schema: type[msgspec.Struct], data: Mapping[str, Any], message: str) -> str:
    rule, _, path_text = message.rpartition(" - at `$")
    if not rule:
        rule, path_text = message, ""
    path: tuple[Step, ...] = tuple(
        int(index) if index else key
        for key, index in re.findall(r"\.?([\w-]+)(?=[.\[`]|$)|\[(\d+)\]", path_text.rstrip("`"))
    )
    dotted = path_text.rstrip("`").lstrip(".")
    if found := re.match(r"Object missing required field `(\w+)`", rule):
        key = dotted_key((*path, found[1]))
        inside = [field.path for field in schema_fields(schema) if field.path.startswith(key + ".")]
        missing = field_at(schema, data, (*path, found[1]))
        kind = missing.type if missing is not None and not inside else "value"
        way_out = f"Set it through {', '.join(inside[:6])}." if inside else f"Set {key}=<{kind}>."
        return f"{'.'.join(part for part in (dotted, found[1]) if part)} is required and has no default. {way_out}"
    try:
        value = value_at(data, path)
    except (KeyError, IndexError, TypeError):
        value = None
    if isinstance(value, Mapping) or not path:
        return f"{dotted}: {rule}" if dotted and dotted not in rule else rule
    shown = msgspec.json.encode(value).decode()
    text = f"{dotted} is {shown}; {rule[0].lower()}{rule[1:].replace('`', '')}."
    field = field_at(schema, data, path)
    if field is not None:
        near = nearest(value, field.type.split(" | ")) if isinstance(value, str) and " | " in field.type else None
        hint = f" Did you mean {near}?" if near else ""
        default = "it is required" if field.default == "required" else f"default: {field.default}"
        return f"{text}{hint} It takes {field.type}; {default}."
    below = dict.fromkeys(one.path for one in schema_fields(schema) if one.path.startswith(f"{dotted}."))
    return f"{text} Set what is below it: {', '.join(list(below)[:6])}." if below else text


def to_yaml(config: msgspec.Struct) -> str:
    """The whole configuration, defaults included, as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(msgspec.to_builtins(config)))


def write_resolved(config: msgspec.Struct, path: Path) -> None:
    """Writes the whole configuration, defaults included, as JSON: complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(msgspec.to_builtins(config), indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
