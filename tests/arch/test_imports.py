"""Proves: imports point down one chain, and each confined library is imported only where DESIGN allows it.

Does not prove: that modules reached through importlib obey the same; the verbs of conf/jobs.py and conf/execute.py are.
"""

import fnmatch

import pytest

from tests.helpers.source import FOLDERS, Module, imports, modules, parse

# folder -> what its modules may import of ours: a folder, or one module of it.
ALLOWED: dict[str, tuple[str, ...]] = {
    "kernels": ("kernels",),
    "sandbox": ("sandbox",),
    "conf": ("conf",),
    "model": ("model", "kernels", "sandbox.types", "conf.errors", "conf.console"),
    "rollout": ("rollout", "model", "kernels", "sandbox", "conf.errors", "conf.console"),
    "rl": ("rl", "rollout", "model", "kernels", "sandbox", "conf.errors", "conf.console", "conf.load", "conf.wheel"),
    "distill": ("distill", "rl", "rollout", "model", "kernels", "sandbox", "conf.errors", "conf.console", "conf.load"),
}
# The configuration's leaves, below everything; the command line is above everything and imported by nobody.
CONF: dict[str, tuple[str, ...]] = {
    "conf/errors.py": (),
    "conf/console.py": (),
    "conf/schema.py": (),
    "conf/load.py": ("conf.errors", "conf.schema"),
    "conf/run_dir.py": ("conf.errors", "conf.schema"),
    "conf/wheel.py": ("conf.errors", "conf.load"),
    "conf/recipe.py": ("conf.errors", "conf.schema", "conf.load"),
}
# library -> files that may import it.
CONFINED: dict[str, tuple[str, ...]] = {
    "ray": (
        "*/actors.py",
        "rollout/placement.py",
        "rl/placement.py",
        "sandbox/placement.py",
        "rl/train.py",
        "rl/evaluate.py",
        "distill/train.py",
        "conf/submit.py",
    ),
    "hydra": ("conf/load.py",),
    "omegaconf": ("conf/load.py",),
    "tilelang": ("kernels/*_tile.py",),
    "tvm": ("kernels/*_tile.py",),
    "deepspeed": ("model/trainer.py", "model/optim*"),
    "vllm": ("rollout/engine/vllm.py",),
    "rich": ("conf/console.py",),
    "transformers": (),
    "tests": (),
}
# Configuration schemas, and what they need: importing one must cost neither torch nor ray.
SCHEMAS = ("*/config.py", "*/*_config.py", "*/types.py", "model/shapes.py", "model/plan.py", "*/errors.py")
HEAVY = ("torch", "ray", "deepspeed", "transformers")


def direction_faults(module: Module) -> list[str]:
    allowed = CONF.get(module.path, ALLOWED[module.folder])
    faults: list[str] = []
    for found in imports(module):
        if found.name.startswith("."):
            faults.append(f"{module.path}:{found.line} relative import")
            continue
        parts = found.name.split(".")
        if parts[0] in FOLDERS and parts[0] != "sandbox":
            faults.append(f"{module.path}:{found.line} imports bare {found.name}; write rollforward.{found.name}")
        if parts[0] != "rollforward":
            continue
        inner = ".".join(parts[1:])
        if not any(inner == name or inner.startswith(name + ".") for name in allowed):
            may = ", ".join(allowed) or "nothing"
            faults.append(f"{module.path}:{found.line} imports {inner}; {module.folder} may import {may}")
    return faults


def confinement_faults(module: Module) -> list[str]:
    faults: list[str] = []
    for found in imports(module):
        library = found.name.split(".")[0]
        places = CONFINED.get(library)
        if places is not None and not any(fnmatch.fnmatch(module.path, place) for place in places):
            faults.append(
                f"{module.path}:{found.line} imports {library}, which is confined to {', '.join(places) or 'tests'}"
            )
    reads_environment = any(word in module.text for word in ("os.environ", "os.getenv", "os.putenv", "from os import"))
    if reads_environment and module.path not in ("conf/load.py", "kernels/dispatch.py"):
        faults.append(f"{module.path} touches the environment; only conf/load.py and kernels/dispatch.py do")
    return faults


def schema_faults(all_modules: tuple[Module, ...]) -> list[str]:
    """Heavy libraries reached from a schema module through imports at module level."""
    by_name = {
        "rollforward." + m.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): m for m in all_modules
    }
    faults: list[str] = []
    for schema in all_modules:
        if not any(fnmatch.fnmatch(schema.path, pattern) for pattern in SCHEMAS):
            continue
        seen: set[str] = set()
        waiting = [schema]
        while waiting:
            module = waiting.pop()
            for found in imports(module):
                if found.is_lazy:
                    continue
                if found.name.split(".")[0] in HEAVY:
                    faults.append(
                        f"{schema.path} reaches {found.name.split('.')[0]} through {module.path}:{found.line}"
                    )
                parts = found.name.split(".")
                for end in range(1, len(parts) + 1):
                    name = ".".join(parts[:end])
                    if name in by_name and name not in seen:
                        seen.add(name)
                        waiting.append(by_name[name])
    return faults


def test_imports_point_down_one_chain() -> None:
    assert [fault for module in modules() for fault in direction_faults(module)] == []


def test_confined_libraries_stay_where_they_may_be() -> None:
    assert [fault for module in modules() for fault in confinement_faults(module)] == []


def test_schema_modules_reach_neither_torch_nor_ray() -> None:
    assert schema_faults(modules()) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("kernels/x.py", "from rollforward.model.config import ModelConfig"),
        ("model/x.py", "def f():\n    import rollforward.rollout.types"),
        ("rl/x.py", "from rollforward.distill import losses"),
        ("sandbox/x.py", "from rollforward.conf import console"),
        ("rl/x.py", "from rollforward.conf import cli"),
        ("rl/x.py", "from . import y"),
        ("rl/x.py", "from kernels import checks"),
        ("conf/load.py", "from rollforward.rl.config import RLRun"),
    ],
)
def test_a_planted_direction_fault_is_found(path: str, text: str) -> None:
    assert direction_faults(parse(path, text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("rl/controller.py", "import ray"),
        ("rl/controller.py", "def f():\n    from ray.util import queue"),
        ("model/trainer.py", "import hydra"),
        ("rl/config.py", "from omegaconf import OmegaConf"),
        ("kernels/moe/gate.py", "import tilelang"),
        ("rl/x.py", "import os\nos.environ['A']"),
        ("model/encoding.py", "import transformers"),
    ],
)
def test_a_planted_confinement_fault_is_found(path: str, text: str) -> None:
    assert confinement_faults(parse(path, text))


def test_a_schema_that_reaches_torch_through_another_module_is_found() -> None:
    assert schema_faults(
        (parse("rl/config.py", "from rollforward.rl import advantage"), parse("rl/advantage.py", "import torch"))
    )


def test_what_a_schema_imports_for_types_alone_costs_nothing() -> None:
    heavy = parse("rl/advantage.py", "import torch")
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rollforward.rl import advantage"
    assert not schema_faults((parse("rl/config.py", for_types), heavy))
    assert schema_faults((parse("rl/config.py", for_types.replace("if TYPE_CHECKING", "if not TYPE_CHECKING")), heavy))


def test_allowed_places_are_allowed() -> None:
    assert not confinement_faults(parse("rollout/actors.py", "import ray"))
    assert not confinement_faults(parse("kernels/moe/gate_tile.py", "import tilelang"))
    assert not direction_faults(parse("rollout/wal.py", "from rollforward.sandbox.codec import x"))
