"""The hardware probe reads limits from made-up /proc and /sys trees of every kind of container."""

from pathlib import Path

import pytest

from octavo.planning.hardware import Hardware, probe

GIB = 2**30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:   12582912 kB\n"
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write a machine: 16 GiB, 12 of them free, plus ``files``."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def look(root: Path, cpus: int = 8) -> Hardware:
    return probe(root, affinity=range(cpus))


def test_without_any_cgroup_the_physical_memory_is_the_limit(tmp_path: Path) -> None:
    found = look(tree(tmp_path, {}))
    assert found.memory_total == 16 * GIB
    assert found.memory_available == 12 * GIB
    assert found.cpu_quota is None


def test_cgroup_v2_limits_memory_and_cpu(tmp_path: Path) -> None:
    found = look(
        tree(
            tmp_path,
            {
                "proc/self/cgroup": "0::/app\n",
                "proc/self/mountinfo": V2_MOUNT,
                "sys/fs/cgroup/app/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/app/memory.high": "max\n",
                "sys/fs/cgroup/app/memory.current": f"{2 * GIB}\n",
                "sys/fs/cgroup/app/memory.stat": f"anon {GIB}\nactive_file {GIB // 2}\ninactive_file {GIB // 4}\n",
                "sys/fs/cgroup/app/cpu.max": "250000 100000\n",
            },
        )
    )
    assert found.memory_total == 4 * GIB
    # Page cache is given back under pressure, so it does not count as used.
    assert found.memory_available == 4 * GIB - (2 * GIB - GIB // 2 - GIB // 4)
    assert found.cpu_quota == 2.5
    assert "cgroup v2 limit" in found.describe()


def test_the_strictest_ancestor_of_a_cgroup_counts(tmp_path: Path) -> None:
    found = look(
        tree(
            tmp_path,
            {
                "proc/self/cgroup": "0::/slice/app\n",
                "proc/self/mountinfo": V2_MOUNT,
                "sys/fs/cgroup/slice/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/slice/memory.current": "0\n",
                "sys/fs/cgroup/slice/cpu.max": "100000 100000\n",
                "sys/fs/cgroup/slice/app/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/slice/app/cpu.max": "max 100000\n",
            },
        )
    )
    assert found.memory_total == 2 * GIB
    assert found.cpu_quota == 1.0


def test_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    found = look(
        tree(
            tmp_path,
            {
                "proc/self/cgroup": "0::/app\n",
                "proc/self/mountinfo": V2_MOUNT,
                "sys/fs/cgroup/app/memory.max": "max\n",
                "sys/fs/cgroup/app/memory.high": f"{3 * GIB}\n",
            },
        )
    )
    assert found.memory_total == 3 * GIB


def test_cgroup_v1_inside_a_container_is_found_below_its_mount(tmp_path: Path) -> None:
    memory = "40 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    cpu = "41 31 0:33 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
    found = look(
        tree(
            tmp_path,
            {
                "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n",
                "proc/self/mountinfo": memory + cpu,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 2}\n",
                "sys/fs/cgroup/memory/memory.stat": f"total_active_file {GIB // 8}\ntotal_inactive_file {GIB // 8}\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
        )
    )
    assert found.memory_total == GIB
    assert found.memory_available == GIB - GIB // 4
    assert found.cpu_quota == 1.5
    assert found.default_threads == 1


def test_an_unlimited_cgroup_v1_is_no_limit(tmp_path: Path) -> None:
    mounts = "40 31 0:32 / /cg/memory rw - cgroup cgroup rw,memory\n41 31 0:33 / /cg/cpu rw - cgroup cgroup rw,cpu\n"
    found = look(
        tree(
            tmp_path,
            {
                "proc/self/cgroup": "5:memory:/\n4:cpu:/\n",
                "proc/self/mountinfo": mounts,
                "cg/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "cg/cpu/cpu.cfs_quota_us": "-1\n",
                "cg/cpu/cpu.cfs_period_us": "100000\n",
            },
        )
    )
    assert found.memory_total == 16 * GIB
    assert found.cpu_quota is None


def test_a_path_outside_the_cgroup_namespace_falls_back_to_the_mount(tmp_path: Path) -> None:
    found = look(
        tree(
            tmp_path,
            {
                "proc/self/cgroup": "0::/../../other\n",
                "proc/self/mountinfo": V2_MOUNT,
                "sys/fs/cgroup/memory.max": f"{5 * GIB}\n",
            },
        )
    )
    assert found.memory_total == 5 * GIB


def test_hyper_threads_share_a_core(tmp_path: Path) -> None:
    files = {}
    for cpu in range(8):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/core_id"] = f"{cpu % 4}\n"
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = "0\n"
    root = tree(tmp_path, files)
    assert look(root).physical_cores == 4
    assert look(root).logical_cpus == 8
    assert probe(root, affinity=[0, 4]).physical_cores == 1


def test_equal_core_numbers_of_two_packages_are_two_cores(tmp_path: Path) -> None:
    files = {}
    for cpu in range(4):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/core_id"] = f"{cpu % 2}\n"
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"] = f"{cpu // 2}\n"
    assert probe(tree(tmp_path, files), affinity=range(4)).physical_cores == 4


def test_without_topology_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert look(tree(tmp_path, {}), cpus=3).physical_cores == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [("always [madvise] never\n", "madvise"), ("[always] madvise never\n", "always"), ("garbage\n", "unavailable")],
)
def test_the_huge_page_setting_is_read(tmp_path: Path, text: str, expected: str) -> None:
    assert look(tree(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})).huge_pages == expected


def test_the_cpu_model_is_read(tmp_path: Path) -> None:
    found = look(tree(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 3GHz\n"}))
    assert found.cpu_model == "Some CPU @ 3GHz"
    assert "Some CPU @ 3GHz" in found.describe()


def test_damaged_files_are_unknown_and_not_an_error(tmp_path: Path) -> None:
    found = look(
        tree(
            tmp_path,
            {
                "proc/self/cgroup": "nonsense\n0::/app\n",
                "proc/self/mountinfo": "short\n" + V2_MOUNT + "1 2 3 - cgroup2\n",
                "sys/fs/cgroup/app/memory.max": "many\n",
                "sys/fs/cgroup/app/cpu.max": "0 0\n",
                "proc/cpuinfo": "\0\0",
            },
        )
    )
    assert found.memory_total == 16 * GIB
    assert found.cpu_quota is None


def test_the_real_machine_can_be_probed() -> None:
    found = probe()
    assert 0 < found.memory_available <= found.memory_total
    assert 1 <= found.physical_cores <= found.logical_cpus
    assert found.default_threads >= 1
