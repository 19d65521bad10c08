"""What this process may use of the machine: memory and CPU limits of its cgroup, cores, CPU model, huge pages.

Everything is read from /proc and /sys below ``root``, so that tests can hand in made-up trees. A file that is absent or
unreadable means "not limited" or "unknown", never an error: the probe has to work in any container.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from octavo.planning.units import format_bytes

__all__ = ["Hardware", "MemoryCeiling", "probe"]

# What current kernels name each setting, read from .../transparent_hugepage/enabled: "always [madvise] never".
_HUGE_PAGES = Path("sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True)
class MemoryCeiling:
    """One limit on memory and how much of it is taken by things that cannot be dropped (page cache can)."""

    source: str
    limit: int
    in_use: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """The part of the machine that this process may use."""

    cpu_model: str
    architecture: str
    logical_cpus: int
    physical_cores: int
    cpu_quota: float | None
    memory: tuple[MemoryCeiling, ...]
    huge_pages: str

    @property
    def memory_total(self) -> int:
        """The smallest memory limit that applies, in bytes."""
        return min(ceiling.limit for ceiling in self.memory)

    @property
    def memory_available(self) -> int:
        """Bytes that can still be taken before the first limit is met."""
        return max(0, min(ceiling.limit - ceiling.in_use for ceiling in self.memory))

    @property
    def default_threads(self) -> int:
        """One thread per physical core, but no more than the CPU quota pays for: throttled threads stall a step."""
        threads = self.physical_cores
        if self.cpu_quota is not None:
            threads = min(threads, int(self.cpu_quota))
        return max(1, threads)

    def describe(self) -> str:
        """One line for people: CPU, cores, quota, memory, huge pages."""
        cores = f"{self.physical_cores} core{'s' if self.physical_cores != 1 else ''}"
        if self.logical_cpus != self.physical_cores:
            cores += f" ({self.logical_cpus} threads)"
        if self.cpu_quota is not None:
            cores += f", quota {self.cpu_quota:g} CPUs"
        memory = f"{format_bytes(self.memory_available)} of {format_bytes(self.memory_total)} memory free"
        limited = min(self.memory, key=lambda ceiling: ceiling.limit)
        if limited.source != "physical":
            memory += f" ({limited.source} limit)"
        return f"{self.cpu_model} ({self.architecture}), {cores}, {memory}, huge pages: {self.huge_pages}"


def probe(root: Path = Path("/"), *, affinity: Iterable[int] | None = None) -> Hardware:
    """Read the hardware below ``root``; ``affinity`` overrides the set of CPUs this process may run on."""
    cpus = set(affinity) if affinity is not None else _affinity()
    groups = list(_cgroups(root))
    return Hardware(
        cpu_model=_cpu_model(root),
        architecture=platform.machine(),
        logical_cpus=len(cpus),
        physical_cores=_physical_cores(root, cpus),
        cpu_quota=_cpu_quota(groups),
        memory=tuple(_memory_ceilings(root, groups)),
        huge_pages=_huge_pages(root),
    )


# --- CPU -------------------------------------------------------------------------------------------------------------


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _cpu_model(root: Path) -> str:
    for line in _lines(root / "proc/cpuinfo"):
        key, _, value = line.partition(":")
        # x86 has "model name"; ARM kernels give a board name under "Hardware" or "Model", or nothing at all.
        if key.strip() in ("model name", "Hardware", "Model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def _physical_cores(root: Path, cpus: set[int]) -> int:
    """Distinct (package, core) pairs among ``cpus``; hyper-threads of one core share its arithmetic units."""
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        core, package = _text(topology / "core_id"), _text(topology / "physical_package_id")
        cores.add((package, core) if core is not None else ("cpu", str(cpu)))
    return max(1, len(cores))


def _cpu_quota(groups: list[_Group]) -> float | None:
    """The smallest CPU quota of this cgroup and its ancestors, in CPUs."""
    quotas = []
    for group in groups:
        for directory in group.directories():
            if group.version == 2:
                quota_text, _, period_text = (_text(directory / "cpu.max") or "").partition(" ")
                quota, period = _integer(quota_text), _integer(period_text)
            elif "cpu" in group.controllers:
                quota = _integer(_text(directory / "cpu.cfs_quota_us"))
                period = _integer(_text(directory / "cpu.cfs_period_us"))
            else:
                continue
            if quota is not None and period is not None and quota > 0 and period > 0:
                quotas.append(quota / period)
    return min(quotas, default=None)


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory_ceilings(root: Path, groups: list[_Group]) -> Iterator[MemoryCeiling]:
    physical = _physical_memory(root)
    yield physical
    for group in groups:
        for directory in group.directories():
            if group.version == 2:
                limits = [_integer(_text(directory / name)) for name in ("memory.max", "memory.high")]
                usage = _integer(_text(directory / "memory.current"))
                cache_names = ("active_file", "inactive_file")
            elif "memory" in group.controllers:
                limits = [_integer(_text(directory / "memory.limit_in_bytes"))]
                usage = _integer(_text(directory / "memory.usage_in_bytes"))
                cache_names = ("total_active_file", "total_inactive_file")
            else:
                continue
            limit = min((value for value in limits if value is not None), default=None)
            # cgroup v1 writes "no limit" as a huge number; a limit above physical memory cannot be met first.
            if limit is None or limit >= physical.limit:
                continue
            cache = _page_cache(directory / "memory.stat", cache_names)
            yield MemoryCeiling(f"cgroup v{group.version}", limit, max(0, (usage or 0) - cache))


def _physical_memory(root: Path) -> MemoryCeiling:
    values = {}
    for line in _lines(root / "proc/meminfo"):
        key, _, value = line.partition(":")
        number = _integer(value.split()[0]) if value.split() else None
        if number is not None:
            values[key] = number * 1024
    total = values.get("MemTotal")
    if total is None:
        pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return MemoryCeiling("physical", pages * page, 0)
    available = values.get("MemAvailable", values.get("MemFree", total))
    return MemoryCeiling("physical", total, max(0, total - available))


def _page_cache(stat: Path, names: tuple[str, ...]) -> int:
    """File pages charged to a cgroup: the kernel drops them before it refuses memory."""
    total = 0
    for line in _lines(stat):
        key, _, value = line.partition(" ")
        if key in names:
            total += _integer(value) or 0
    return total


def _huge_pages(root: Path) -> str:
    text = _text(root / _HUGE_PAGES)
    if text is None or "[" not in text:
        return "unavailable"
    return text.partition("[")[2].partition("]")[0]


# --- cgroups ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """This process's place in one cgroup hierarchy: where it is mounted, and the path below the mount."""

    version: int
    controllers: frozenset[str]
    mount: Path
    path: PurePosixPath

    def directories(self) -> Iterator[Path]:
        """Its own directory and all ancestors up to the mount: limits apply at every level."""
        parts = self.path.parts
        for depth in range(len(parts), -1, -1):
            yield self.mount.joinpath(*parts[:depth])


def _cgroups(root: Path) -> Iterator[_Group]:
    mounts = list(_cgroup_mounts(root))
    for line in _lines(root / "proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        controllers = frozenset(name for name in fields[1].split(",") if name)
        version = 1 if controllers else 2
        for mount in mounts:
            same = mount.version == version and (version == 2 or controllers <= mount.controllers)
            if same:
                yield _Group(version, controllers, mount.mount, _below_mount(fields[2], mount.path))
                break


def _cgroup_mounts(root: Path) -> Iterator[_Group]:
    """The mounted cgroup hierarchies; ``path`` is the part of the hierarchy that is visible at the mount."""
    for line in _lines(root / "proc/self/mountinfo"):
        # "36 35 98:0 /root /mount/point options... - fstype source super,options"
        before, separator, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if not separator or len(left) < 5 or not right or right[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if right[0] == "cgroup2" else 1
        controllers = frozenset(right[-1].split(",")) if version == 1 else frozenset[str]()
        yield _Group(version, controllers, root / left[4].lstrip("/"), PurePosixPath(left[3]))


def _below_mount(path: str, mount_root: PurePosixPath) -> PurePosixPath:
    """The group's path relative to the mount.

    In a container without its own cgroup namespace, /proc/self/cgroup gives the path on the host while the mount shows
    that very group at its top. A path outside the mount ("/..") leaves the mount itself as the best known ancestor.
    """
    group = PurePosixPath(path)
    if group.is_relative_to(mount_root):
        relative = group.relative_to(mount_root)
        return relative if ".." not in relative.parts else PurePosixPath()
    return PurePosixPath()


# --- reading ---------------------------------------------------------------------------------------------------------


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _lines(path: Path) -> list[str]:
    return (_text(path) or "").splitlines()


def _integer(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None
