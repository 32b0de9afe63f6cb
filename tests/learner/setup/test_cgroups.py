"""llm_utils/setup/cgroups.py: the limits of a container, and of a job inside it, in version 2 and 1."""

import pytest
import torch

from llm_utils.setup import cgroups, preflight


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write which groups the process is in, and files of groups below the root."""
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "MINE", tmp_path / "mine")

    def write(mine, **groups):
        (tmp_path / "mine").write_text(mine)
        for name, files in groups.items():
            folder = tmp_path / "cgroup" / name.replace("__", "/")
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in files.items():
                (folder / file).write_text(f"{text}\n")

    return write


def test_the_limit_of_a_job_counts_beside_that_of_what_is_above_it(write):
    job = {"memory.max": 2000, "memory.current": 900, "memory.stat": "anon 1\ninactive_file 100", "cpu.max": "150 100"}
    whole = {"memory.max": 9000, "memory.current": 5000, "cpu.max": "400 100"}
    write("0::/slurm/job_1/step_0\n", slurm__job_1=job, slurm=whole, slurm__job_2={"memory.max": 1, "cpu.max": "1 100"})
    assert sorted(cgroups.memory_left()) == [1200, 4000] and cgroups.cores() == 1.5
    assert preflight.memory_of(torch.device("cpu")) == 1200
    write("0::/slurm/job_1/step_0\n", slurm__job_1={"cpu.max": "max 100"})
    assert cgroups.cores() == 4
    write("", slurm__job_1={"memory.max": "max"})
    assert cgroups.memory_left() == [] and cgroups.cores() == float("inf")


def test_limits_of_version_1(write):
    memory = {"memory.limit_in_bytes": 700, "memory.usage_in_bytes": 300, "memory.stat": "total_inactive_file 50"}
    free = {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": 0}
    write(
        "9:name=systemd:/\n4:memory:/job\n1:cpu,cpuacct:/job\n2:cpuset:/pinned\n0::/\n",
        cpu__pinned={"cpu.cfs_quota_us": 1, "cpu.cfs_period_us": 100},
        memory__job=memory, memory=free,
        cpu__job={"cpu.cfs_quota_us": 250, "cpu.cfs_period_us": 100},
        cpu={"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100},
    )  # fmt: skip
    assert min(cgroups.memory_left()) == 450 and cgroups.cores() == 2.5


@pytest.mark.parametrize("mine", ["0::/\n", "0::/../../other\n", "0::/kubepods/of/the/host\n", ""])
def test_a_container_s_limit_stands_at_the_root(write, mine, tmp_path):
    write(mine, **{"": {"memory.max": 500, "memory.current": 100}})
    (tmp_path / "memory.max").write_text("1")  # above the root
    assert cgroups.memory_left() == [400]


@pytest.mark.parametrize(
    ("mine", "files"),
    [
        ("no line of the kernel's\n0::\n:::\n", {}),
        ("0::/\n", {"memory.max": 500}),  # no memory.current
        ("0::/\n", {"memory.max": "many", "memory.current": 1, "cpu.max": "some"}),
        ("0::/\n", {"memory.max": 500, "memory.current": "", "cpu.max": "100 0"}),
        ("0::/\n", {"cpu.max": "100", "cpu.cfs_quota_us": 100}),
        ("0::/\0\n", {"memory.max": "max"}),
    ],
)
def test_what_is_odd_is_no_limit(write, mine, files):
    write(mine, **{"": files})
    assert cgroups.memory_left() == [] and cgroups.cores() == float("inf")


def test_a_line_of_a_group_s_memory_that_is_odd_is_left_out(write, tmp_path):
    write("0::/\n", **{"": {"memory.max": 500, "memory.current": 100, "memory.stat": "odd\ninactive_file 50\na b c"}})
    assert cgroups.memory_left() == [450]
    write("0::/\n", **{"": {"memory.stat": "inactive_file few"}})
    assert cgroups.memory_left() == [400]
    write("0::/\n", **{"": {"memory.stat": "inactive_file 50"}})
    (tmp_path / "mine").write_bytes(b"0::/caf\xe9\n")
    assert cgroups.memory_left() == [450]
    (tmp_path / "cgroup" / "memory.max").unlink()
    (tmp_path / "cgroup" / "memory.max").mkdir()  # as one that can't be read
    assert cgroups.memory_left() == []


def test_without_control_groups_there_is_no_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "none")
    monkeypatch.setattr(cgroups, "MINE", tmp_path / "none")
    assert cgroups.memory_left() == [] and cgroups.cores() == float("inf")
