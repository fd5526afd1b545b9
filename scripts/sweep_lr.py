"""Find the learning rates of a stage by short runs.

python scripts/sweep_lr.py --stage stage2 --options stage2.yaml --lr 3e-4 1e-3 3e-3 --lr_new 3e-3 1e-2 --output_dir runs/sweep

Each run has the whole schedule (warm-up and cosine) of its own short budget, so that rates are compared at the end of a decay.  Runs lie
below --output_dir and are not repeated by a second start.
"""

import dataclasses
import itertools
from pathlib import Path

from megahedge.utils.cli import Count, parse_options, read_options_file, run_main
from megahedge.utils.errors import InputError
from megahedge.utils.jobs import Job, check_jobs, run_jobs

SCRIPTS = Path(__file__).parent
STAGES = ("stage1", "stage2")
OWN = ("lr", "lr_new", "train_tokens", "output_dir", "resume", "config")
"""Options of the runs that the sweep sets itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """scripts/sweep_lr.py"""

    stage: str
    """Which command to sweep: stage1 or stage2."""
    options: str
    """YAML file of that command's other options: teacher, data, sizes, recipe."""
    lr: tuple[float, ...]
    """Peak learning rates to try."""
    lr_new: tuple[float, ...] = ()
    """Of stage 2: rates to try for what it adds, each with each of --lr (default: those of the recipe)."""
    train_tokens: Count = 20 * 10**6
    """Tokens of each run."""
    output_dir: str = "runs/sweep"
    """Folder of the runs."""
    parallel: int = 1
    """Runs at a time; each takes the GPUs or cores that it finds."""

    def __post_init__(self):
        if self.stage not in STAGES:
            raise InputError(f"--stage={self.stage} is not known; use {' or '.join(STAGES)}")
        if self.lr_new and self.stage == "stage1":
            raise InputError(
                f"--lr_new={' '.join(map(str, self.lr_new))} goes with --stage stage2; stage 1 adds nothing that has a rate of its own"
            )
        check_jobs(self.output_dir, self.parallel, lr=self.lr, **({"lr_new": self.lr_new} if self.lr_new else {}))


def sweep(options: SweepOptions) -> str:
    """Run every combination of rates; a table, best first."""
    fixed = read_options_file(options.options, "options")
    taken = [name for name in OWN if name in fixed]
    if taken:
        raise InputError(f"--options={options.options} names {', '.join(taken)}, which the sweep sets itself; leave them out there")
    rates = list(itertools.product(options.lr, options.lr_new or (None,)))
    jobs = [
        Job(
            SCRIPTS / f"{options.stage}.py",
            fixed | {"train_tokens": options.train_tokens, "lr": lr} | ({} if lr_new is None else {"lr_new": lr_new}),
            Path(options.output_dir) / (f"lr-{lr:g}" if lr_new is None else f"lr-{lr:g}-new-{lr_new:g}"),
        )
        for lr, lr_new in rates
    ]
    losses = [summary["validation_loss"] for summary in run_jobs(jobs, options.parallel)]
    ranked = sorted(zip(losses, rates, strict=True), key=lambda entry: (entry[0] is None, entry[0]))
    header = f"{'lr':>8} {'lr_new':>8} {'validation loss':>16}"
    rows = [
        f"{lr:8g} {'-' if lr_new is None else f'{lr_new:g}':>8} {'diverged' if loss is None else f'{loss:.4f}':>16}"
        for loss, (lr, lr_new) in ranked
    ]
    return "\n".join([header, *rows])


def main() -> None:
    """Entry point."""
    print(sweep(parse_options(SweepOptions, prog="sweep_lr.py", description="Find the learning rates of a stage by short runs.")))


if __name__ == "__main__":
    run_main(main)
