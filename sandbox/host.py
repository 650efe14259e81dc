"""What this machine can enforce of what a container promises, and what to do where it cannot."""

import msgspec

from rollforward.sandbox import cgroups
from rollforward.sandbox.errors import SandboxUnavailableError


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Something that this machine cannot enforce."""

    what: str
    """What is missing."""
    consequence: str
    """What a sandbox can do because of that."""
    way_out: str
    """What to change on the machine."""


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor has found at its start."""

    missing: tuple[Missing, ...] = ()
    """Empty where everything is enforced."""
    hierarchies: str = ""
    """Which control groups there are."""
    layers: str = ""
    """How containers see the layers of images: as mounted files or as directories, and why; `none` where there are
    none."""

    def check(self, trusted_code: bool) -> None:
        """Refuse code that nobody trusts where something is missing.

        Raises:
            SandboxUnavailableError: it is, and the code is not trusted.
        """
        if self.missing and not trusted_code:
            said = "; ".join(f"{m.what}: {m.consequence} ({m.way_out})" for m in self.missing)
            raise SandboxUnavailableError(
                f"sandbox.container: this machine cannot enforce every limit: {said}. Or set"
                " sandbox.container.trusted_code=true where what runs means no harm"
            )


def probe(found: cgroups.Hierarchies | None = None) -> HostReport:
    """Look at this machine.

    Args:
        found: control groups; None: look for them.
    """
    found = cgroups.find() if found is None else found
    missing: list[Missing] = []
    way_out = (
        "run as root with a writable /sys/fs/cgroup, or with `systemd-run --user --scope -p Delegate=yes`; in a"
        " container start it with --cgroupns=private and a writable cgroup mount"
    )
    if found.memory is None:
        missing.append(
            Missing(
                what="no control group for memory",
                consequence="memory is limited by process only, so that a sandbox holds that much times its processes",
                way_out=way_out,
            )
        )
    if found.pids is None:
        missing.append(
            Missing(
                what="no control group for processes",
                consequence="processes are counted by user only",
                way_out=way_out,
            )
        )
    kinds = [f"{name}: {path}" for name, path in (("memory", found.memory), ("pids", found.pids)) if path is not None]
    return HostReport(missing=tuple(missing), hierarchies=", ".join(kinds) or "none")
