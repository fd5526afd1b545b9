"""A kill during stage 2, sent to the real command."""

import signal

import pytest

from megahedge.checkpoint.store import complete_checkpoints
from tests.stages.runs import STEPS
from tests.training.processes import STAGE2, start
from tests.training.runs import assert_same_end


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_save_ends_as_the_unbroken_run(options, made, tmp_path):
    """Two files a save: the third is of the second save."""
    values = options(2, resume=True)
    killed = start(values, tmp_path / "killed", script=STAGE2, hold=("tensors", 3))
    killed.wait_until_held()
    killed.signal(signal.SIGKILL)
    assert killed.finish()[0] == -signal.SIGKILL
    assert len(complete_checkpoints(tmp_path / "run" / "checkpoints")) == 1
    status, stderr = start(values, tmp_path / "resumed", script=STAGE2).finish()
    assert status == 0, stderr
    assert "hand-over" not in stderr  # it goes on from its own checkpoint
    assert_same_end(tmp_path / "run", made("tuned-2-zero1"), STEPS)
