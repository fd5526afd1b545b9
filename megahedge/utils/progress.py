"""A progress bar where there is a terminal, a plain line every few seconds where there is none."""

import sys
import time

from tqdm import tqdm

from megahedge.utils.units import format_count, format_seconds

PLAIN_INTERVAL_SECONDS = 10.0


class ProgressBar:
    """Counts units of work (tokens, documents) towards a total, on stderr.

    With `enabled` false (all ranks but the first) it prints nothing.
    """

    def __init__(self, total: int | None, unit: str, *, initial: int = 0, description: str = "", enabled: bool = True):
        self.total, self.unit, self.description = total, unit, description
        self.count = initial
        self.enabled = enabled
        self._initial = initial
        self._started = self._printed = time.monotonic()
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=initial, desc=description, unit=unit, unit_scale=True, smoothing=0.1, dynamic_ncols=True)

    def update(self, amount: int, **values: str) -> None:
        """Advance by `amount`; `values` are shown beside the rate."""
        self.count += amount
        if self._bar is not None:
            self._bar.set_postfix(values, refresh=False)
            self._bar.update(amount)
        elif self.enabled and time.monotonic() - self._printed >= PLAIN_INTERVAL_SECONDS:
            self._print(values)

    @property
    def rate(self) -> float:
        """Units per second since the start."""
        return (self.count - self._initial) / max(1e-9, time.monotonic() - self._started)

    def _print(self, values: dict[str, str]) -> None:
        self._printed = time.monotonic()
        parts = [f"{self.description} {format_count(self.count)}"]
        if self.total is not None:
            parts[0] += f"/{format_count(self.total)} {self.unit} ({self.count / self.total:.0%})"
            if self.rate > 0:
                parts.append(f"ETA {format_seconds((self.total - self.count) / self.rate)}")
        else:
            parts[0] += f" {self.unit}"
        parts.insert(1, f"{format_count(self.rate)} {self.unit}/s")
        parts += [f"{name} {value}" for name, value in values.items()]
        print("  ".join(parts).strip(), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self._bar.close()
