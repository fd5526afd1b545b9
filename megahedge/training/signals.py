"""Preemption: the scheduler's signal is noted here and acted on at the next step boundary."""

import os
import signal

from megahedge.utils.launcher import global_rank

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_TOLD = b"\nasked to stop: the run ends after its next step, with a checkpoint; Ctrl-C again ends it at once\n"


class StopSignal:
    """Within `with`, SIGTERM, SIGUSR1 and the first SIGINT set `requested` instead of ending the process; a second SIGINT ends it.

    Any one rank's request reaches all ranks in the step's all-reduce, so it is enough that one of them is told.
    Once a stop has been requested, SIGTERM and SIGUSR1 are ignored after `with` as well: who asks twice, as schedulers do, must not
    end a rank that has saved and is about to leave by itself.
    """

    def __init__(self):
        self.requested = False
        self._previous = {}

    def __enter__(self) -> "StopSignal":
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def _note(self, number, frame):
        """No logging here: the signal may have come in the middle of a log line."""
        if number == signal.SIGINT:
            if self.requested:
                raise KeyboardInterrupt
            if global_rank() == 0:
                os.write(2, _TOLD)
        self.requested = True

    def __exit__(self, *exception):
        for number, handler in self._previous.items():
            ignore = self.requested and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if ignore else handler or signal.SIG_DFL)
