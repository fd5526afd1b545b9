"""Compare recipes on one teacher at equal tokens: stage 1, the Hedgehog baseline, `paper` and `tuned`, each with and without stage 1.

python scripts/compare_recipes.py --teacher scripts/quickstart/teacher --data_path data/small --output_dir runs/comparison

A run without a stage 1 gets the tokens of both stages.  Where several rates are given, the first seed finds the best of them, and all
seeds are compared at it.  A run that has diverged has no loss, and neither has its row.  Runs lie below --output_dir; a second start
goes on where the first has ended.
"""

import dataclasses
import math
import statistics
from collections.abc import Hashable
from pathlib import Path

from megahedge.evaluation.evaluate import evaluate
from megahedge.evaluation.options import EvaluateOptions
from megahedge.evaluation.perplexity import perplexity_of
from megahedge.utils.cli import Count, parse_options, run_main
from megahedge.utils.files import finite_or_none, write_json
from megahedge.utils.jobs import Job, check_jobs, run_jobs
from megahedge.utils.versions import code_version

SCRIPTS = Path(__file__).parent
BASELINE = {"decay": "none", "conv_kernel": 0, "gate": False}
"""What makes a stage 2 of the recipe `paper` the paper's Hedgehog baseline: the fine-tuning alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """scripts/compare_recipes.py"""

    teacher: str
    """Folder or hub name of the teacher."""
    data_path: str
    """Prefix of indexed data made with its tokenizer."""
    output_dir: str = "runs/comparison"
    """Folder of the runs and of the table, comparison.json."""
    stage1_tokens: Count = 200_000
    """Tokens of stage 1."""
    stage2_tokens: Count = 800_000
    """Tokens of stage 2."""
    seeds: tuple[int, ...] = (1, 2)
    """Seeds of data order and fresh parameters."""
    stage1_lr: float = 1e-2
    """Peak rate of stage 1, both recipes."""
    lr: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    """Peak rates of stage 2 to try for the baseline and for `paper`."""
    tuned_lr: tuple[float, ...] = (2e-3,)
    """Peak rates of stage 2 to try for `tuned`."""
    tuned_lr_new: float = 1e-2
    """Rate of what stage 2 adds, for `tuned`."""
    seq_len: int = 256
    """Tokens per sequence."""
    global_batch_size: int = 8
    """Sequences per step."""
    dtype: str = "fp32"
    """Precision of the runs: bf16 or fp32."""
    ds_config: str = "ds_configs/zero1.json"
    """DeepSpeed settings."""
    eval_tokens: Count = 100_000
    """Tokens of the validation split that are scored."""
    parallel: int = 1
    """Runs at a time."""

    def __post_init__(self):
        check_jobs(self.output_dir, self.parallel, seeds=self.seeds, lr=self.lr, tuned_lr=self.tuned_lr)


@dataclasses.dataclass(frozen=True, eq=False)
class Contender:
    """A row of the table that has a stage 2."""

    label: str
    recipe: str
    rates: tuple[float, ...]
    changes: dict


class Comparison:
    """The runs, by what they are."""

    def __init__(self, options: CompareOptions):
        self.options = options
        self.root = Path(options.output_dir)
        self.contenders = (
            Contender("hedgehog", "paper", options.lr, BASELINE),
            Contender("paper", "paper", options.lr, {}),
            Contender("tuned", "tuned", options.tuned_lr, {"lr_new": options.tuned_lr_new}),
        )

    def _common(self, seed: int) -> dict:
        names = ("data_path", "seq_len", "global_batch_size", "dtype", "ds_config", "eval_tokens")
        return {name: getattr(self.options, name) for name in names} | {"seed": seed, "save_interval": 10**9, "eval_interval": 10**9}

    def stage1(self, recipe: str, seed: int) -> Job:
        options = self.options
        changes = {"recipe": recipe, "teacher": options.teacher, "train_tokens": options.stage1_tokens, "lr": options.stage1_lr}
        return Job(SCRIPTS / "stage1.py", self._common(seed) | changes, self.root / f"stage1-{recipe}-seed{seed}")

    def stage2(self, contender: Contender, seed: int, lr: float, with_stage1: bool) -> Job:
        options = self.options
        changes = {"recipe": contender.recipe, "lr": lr} | contender.changes
        first = self.stage1(contender.recipe, seed) if with_stage1 else None
        if first is not None:
            changes |= {"init_from": str(first.folder), "train_tokens": options.stage2_tokens}
        else:
            tokens = options.stage1_tokens + options.stage2_tokens
            changes |= {"stage1_steps": 0, "teacher": options.teacher, "train_tokens": tokens}
        start = "" if with_stage1 else "-no-stage1"
        return Job(SCRIPTS / "stage2.py", self._common(seed) | changes, self.root / f"{contender.label}{start}-lr{lr:g}-seed{seed}", first)

    def run(self) -> list[dict]:
        """Rows of the table."""
        options = self.options
        first_seed, recipes = options.seeds[0], ("paper", "tuned")
        stage1 = self._losses({recipe: [self.stage1(recipe, seed) for seed in options.seeds] for recipe in recipes})
        starts = [(contender, with_stage1) for with_stage1 in (True, False) for contender in self.contenders]
        tried = self._losses({start: [self.stage2(start[0], first_seed, lr, start[1]) for lr in start[0].rates] for start in starts})
        best = {start: self._best_rate(start[0].rates, losses) for start, losses in tried.items()}
        final = self._losses({start: [self.stage2(start[0], seed, best[start], start[1]) for seed in options.seeds] for start in starts})
        rows = [self._row("teacher", [self._teacher_loss()])]
        rows += [self._row(f"stage 1, {recipe}", stage1[recipe]) for recipe in recipes]
        for (contender, with_stage1), losses in final.items():
            label = contender.label if with_stage1 else f"{contender.label}, no stage 1"
            rates = dict(zip(map(str, contender.rates), tried[contender, with_stage1], strict=True))
            row = self._row(label, losses) | {"lr": best[contender, with_stage1], "tried": rates}
            rows.append(row | {"recovered": self._recovered(rows, contender.recipe, row["loss"])})
        return rows

    def _losses(self, jobs: dict[Hashable, list[Job]]) -> dict[Hashable, list[float | None]]:
        """Validation losses under the same keys, of runs made side by side; None where a run has diverged."""
        summaries = iter(run_jobs([job for group in jobs.values() for job in group], self.options.parallel))
        return {key: [next(summaries)["validation_loss"] for _ in group] for key, group in jobs.items()}

    @staticmethod
    def _best_rate(rates: tuple[float, ...], losses: list[float | None]) -> float:
        """That of the lowest loss; the first where all have diverged."""
        return min(zip(rates, losses, strict=True), key=lambda tried: math.inf if tried[1] is None else tried[1])[0]

    def _teacher_loss(self) -> float:
        options = self.options
        asked = EvaluateOptions(
            model=options.teacher, data_path=options.data_path, seq_len=options.seq_len, eval_tokens=options.eval_tokens
        )
        return evaluate(asked).perplexity.loss

    @staticmethod
    def _row(label: str, losses: list[float | None]) -> dict:
        """Figures of a row; None unless all of its runs have ended by their budget."""
        finite = None not in losses
        loss = statistics.mean(losses) if finite else None
        spread = statistics.stdev(losses) if finite and len(losses) > 1 else None
        return {"model": label, "loss": loss, "spread": spread, "perplexity": perplexity_of(loss) if finite else None, "losses": losses}

    @staticmethod
    def _recovered(rows: list[dict], recipe: str, loss: float | None) -> float | None:
        """Share of the loss between the recipe's stage 1 and the teacher that is won back; None where one of these is not known."""
        by_model = {row["model"]: row["loss"] for row in rows}
        start = by_model[f"stage 1, {recipe}"]
        return None if loss is None or start is None else (start - loss) / (start - by_model["teacher"])


def table(rows: list[dict]) -> str:
    """For people."""
    lines = [f"{'model':<24} {'lr':>8} {'loss':>8} {'± seeds':>8} {'perplexity':>11} {'recovered':>10}"]
    for row in rows:
        lr, spread, recovered = _show(row.get("lr"), "g"), _show(row["spread"], ".4f"), _show(row.get("recovered"), ".1%")
        loss, perplexity = _show(row["loss"], ".4f", "diverged"), _show(row["perplexity"], ".3f")
        lines.append(f"{row['model']:<24} {lr:>8} {loss:>8} {spread:>8} {perplexity:>11} {recovered:>10}")
    return "\n".join(lines)


def _show(value: float | None, form: str, unknown: str = "-") -> str:
    return unknown if value is None else format(value, form)


def main() -> None:
    """Entry point."""
    options = parse_options(CompareOptions, prog="compare_recipes.py", description="Compare recipes on one teacher at equal tokens.")
    rows = Comparison(options).run()
    record = {"rows": rows, "options": dataclasses.asdict(options), "code": code_version()}
    write_json(Path(options.output_dir) / "comparison.json", finite_or_none(record))
    print(table(rows))


if __name__ == "__main__":
    run_main(main)
