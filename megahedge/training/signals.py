"""Preemption: the scheduler's signal is noted here and acted on at the next step boundary."""

import signal

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """Within `with`, SIGTERM and SIGUSR1 set `requested` instead of ending the process.

    Any one rank's request reaches all ranks in the step's all-reduce, so it is enough that one of them is told.
    """

    def __init__(self):
        self.requested = False
        self._previous = {}

    def __enter__(self) -> "StopSignal":
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def _note(self, number, frame):
        self.requested = True  # and nothing else: the signal may have come in the middle of a log line

    def __exit__(self, *exception):
        for number, handler in self._previous.items():
            signal.signal(number, handler)
