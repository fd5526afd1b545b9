"""The real commands in real processes that start quickly: forked from a server that has torch and DeepSpeed imported already."""

import multiprocessing
import os
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.training.runs import REPOSITORY, command_line

SCRIPT = REPOSITORY / "tools" / "pretrain_teacher.py"
STAGE1, STAGE2 = (REPOSITORY / "scripts" / f"{name}.py" for name in ("stage1", "stage2"))
# the last one is what deepspeed.initialize imports, by way of torch.compile: four seconds
_PRELOADED = [
    "deepspeed",
    "transformers",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "tests.training.processes",
    "megahedge.stages.pretrain",
    "megahedge.stages.stage2",
]

_LONGEST_HOLD_SECONDS = 60


class Command:
    """A script with the words of a command line, started.

    hold=(point, n): wait at the n-th passing of a point named in `_points` until `release`.
    slow_saves: sleep this many seconds in the middle of every save.
    """

    def __init__(self, words: list[str], folder: Path, *, script=SCRIPT, environment=None, hold=None, slow_saves: float = 0.0):
        os.environ["OMP_NUM_THREADS"] = "1"  # read by the server when it starts
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        folder.mkdir(parents=True, exist_ok=True)
        self._stderr, self._held = folder / "stderr", folder / "held"
        self._held.unlink(missing_ok=True)
        arguments = (script, words, self._stderr, self._held, environment or {}, hold, slow_saves)
        self.process = context.Process(target=_main, args=arguments, daemon=True)
        self.process.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.is_alive()

    def wait_until_held(self) -> None:
        """Return as soon as it stands at its holding point."""
        self.wait_until(self._held.exists)

    def wait_until(self, condition: Callable[[], bool], timeout_seconds: float = 60.0) -> None:
        """Return as soon as the condition holds; an error if the command ends before."""
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            assert self.running, self._stderr.read_text()
            assert time.monotonic() < deadline, f"not within {timeout_seconds} s"
            time.sleep(0.005)

    def wait_for_output(self, words: str) -> None:
        """Return as soon as it has written these words."""
        self.wait_until(lambda: self._stderr.exists() and words in self._stderr.read_text())

    def release(self) -> None:
        """Let it go on from its holding point."""
        self._held.unlink()

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.process.pid, number)

    def finish(self, timeout_seconds: float = 120.0) -> tuple[int, str]:
        """Wait for the end; returns exit status and what was written to stderr."""
        self.process.join(timeout_seconds)
        assert not self.running, f"still running after {timeout_seconds} s"
        return self.process.exitcode, self._stderr.read_text()


def start(options: dict, folder: Path, **changes) -> Command:
    """`tools/pretrain_teacher.py`, or another `script`, with options given as a dict."""
    return Command(command_line(options), folder, **changes)


def _main(script, words, stderr, held, environment, hold, slow_saves):
    with open(stderr, "w") as handle:
        os.dup2(handle.fileno(), 1)
        os.dup2(handle.fileno(), 2)
    os.environ.update(environment)
    sys.argv = [str(script), *words]
    os.chdir(REPOSITORY)
    if hold is not None:
        _hold_at(*hold, held)
    if slow_saves:
        _slow_down(slow_saves)
    runpy.run_path(str(script), run_name="__main__")


def _points() -> dict:
    """Moments in which a kill could hurt: what is about to be called there."""
    from megahedge.checkpoint import store
    from megahedge.stages import pretrain
    from megahedge.training import loop, run_folder
    from megahedge.training.metrics import MetricsLog

    return {
        "record": (run_folder, "write_json"),
        "metrics": (MetricsLog, "write"),
        "tensors": (store, "save_file"),
        "manifest": (store, "write_json"),
        "rename": (Path, "rename"),
        "latest": (store, "atomic_write"),
        "removal": (shutil, "rmtree"),
        "evaluation": (loop, "_evaluate"),
        "summary": (loop, "write_json"),
        "export": (pretrain, "save_pretrained"),
    }


def _hold_at(point, passings, held):
    owner, name = _points()[point]
    original, count = getattr(owner, name), 0

    def holding(*arguments, **keywords):
        nonlocal count
        count += 1
        if count == passings:
            _leave_half(point, arguments)
            held.touch()
            deadline = time.monotonic() + _LONGEST_HOLD_SECONDS
            while held.exists():
                if time.monotonic() > deadline:
                    os._exit(3)  # the test has failed and forgotten us, and SIGTERM would only be noted
                time.sleep(0.01)
        return original(*arguments, **keywords)

    setattr(owner, name, holding)


def _leave_half(point, arguments):
    """The state in which a kill inside the call would leave the disk."""
    if point == "tensors":
        Path(arguments[1]).write_bytes(b"half a file")
    elif point in ("record", "manifest", "summary"):
        Path(arguments[0]).parent.mkdir(exist_ok=True)
        Path(arguments[0]).with_name(f".{Path(arguments[0]).name}.1.tmp").write_text('{"half": ')
    elif point == "metrics":
        arguments[0]._handle.write('{"kind": "tr')
        arguments[0]._handle.flush()
    elif point == "removal" and Path(arguments[0]).exists():
        next(Path(arguments[0]).iterdir()).unlink()
    elif point == "export":
        Path(arguments[2]).mkdir(exist_ok=True)
        (Path(arguments[2]) / "model.safetensors").write_bytes(b"half a file")


def _slow_down(seconds):
    owner, name = _points()["tensors"]
    original = getattr(owner, name)

    def slow(tensors, path):
        original(tensors, path)
        time.sleep(seconds)

    setattr(owner, name, slow)
