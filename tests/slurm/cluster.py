"""A real Slurm of two virtual nodes on this machine, in a folder of its own, for as long as a test needs it."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel")
_CONFIGURATION = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={munge}
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd_%n.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why Slurm cannot be run here; None where it can."""
    missing = [name for name in _PROGRAMS if _find(name) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)} missing): apt-get install slurm-wlm slurmctld slurmd munge"
    if os.geteuid() != 0:
        return "Slurm's daemons need root here"
    return None


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


class Cluster:
    """Two nodes of two processors; `start` before use, `stop` after."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._munge = folder / "munge"
        self._environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        self._start_munge()
        text = _CONFIGURATION.format(folder=self.folder, ports=free_ports(3), munge=self._munge / "socket")
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        self._call("slurmctld")
        for node in ("n1", "n2"):
            self._call("slurmd", "-N", node)
        wait_until(lambda: self("sinfo", "--noheader", "--format=%D %t").split() == ["2", "idle"], "the nodes are not idle")

    def _start_munge(self) -> None:
        self._munge.mkdir()
        key = self._munge / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        names = {"key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed", "socket": "socket"}
        options = [f"--{option}={self._munge / name}" for option, name in names.items()]
        # it warns of folders above that others may write, such as /tmp
        subprocess.run([_find("munged"), "--force", *options], check=True, capture_output=True)

    def stop(self) -> None:
        """Cancel all jobs and stop the daemons."""
        try:
            self("scancel", "--user=root", "--signal=KILL", "--full", check=False)
        finally:
            for file in (*self.folder.glob("slurmd_*.pid"), self.folder / "ctld.pid", self._munge / "pid"):
                if file.is_file():
                    subprocess.run(["kill", file.read_text().strip()], check=False)

    def __call__(self, *words: str, check: bool = True, cwd: Path | None = None, **environment: str) -> str:
        """Output of a Slurm command."""
        return self._call(*words, check=check, cwd=cwd, **environment)

    def _call(self, name: str, *words: str, check: bool = True, cwd: Path | None = None, **environment: str) -> str:
        command = [_find(name), *words]
        given = self._environment | environment
        done = subprocess.run(command, env=given, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of a job."""
        words = self("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def start_now(self, number: str) -> None:
        """Spare a requeued job the two minutes that Slurm lets it wait."""
        wait_until(lambda: self.job(number)["JobState"] == "PENDING", f"job {number} is not pending")
        time.sleep(3)  # in the second in which it has ended its credential is revoked
        self("scontrol", "update", f"jobid={number}", "StartTime=now", check=False)

    def wait_for_state(self, number: str, states: Iterable[str], seconds: float) -> str:
        """The state of a job as soon as it is one of these."""
        wait_until(lambda: self.job(number)["JobState"] in states, f"job {number} is not {' or '.join(states)}", seconds)
        return self.job(number)["JobState"]


def wait_until(condition: Callable[[], bool], failure: str, seconds: float = 60.0) -> None:
    """Return as soon as the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{failure} after {seconds:.0f} s"
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
