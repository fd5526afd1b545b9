"""The runs of both stages that tests look at, made world by world.

Names are FLAVOUR-STAGE-CUT: what is computed, in which stage, and how it is cut over processes.
"""

from pathlib import Path

import pytest

from tests.stages.runs import (
    StageRun,
    make_stage_inputs,
    make_stage_runs,
    stage_options,
    write_broken_teacher,
    write_damaged,
    write_moved,
    write_older_version,
    write_other_probe,
    write_other_teacher,
    write_unfinished,
)
from tests.training.runs import ds_config
from tests.worlds import Worlds

NO_STAGE_1 = {"stage1_steps": 0, "teacher": "pretrained/hf", "init_from": None}
FLAVOURS = {
    "paper": ("paper", {}, {}),  # shared maps, decay by channel, text alone
    "tuned": ("tuned", {}, {}),  # maps of each head, decay by head, KL at 0.7, a rate of its own for what is new
    "tied": ("tuned", {"teacher": "pretrained-tied/hf"}, {"kd_temperature": 2.0}),
    "state": (
        "tuned",
        {"match_inputs": "student", "match_targets": "mixer", "match_loss": "cosine_mse"},
        {"decay": "state", "decay_step": "state", "decay_tie_signs": True, "kd_alpha": 0.0, "activation_checkpointing": True},
    ),
    "mixed": (
        "paper",
        {"match_inputs": "teacher", "match_targets": "mixer", "match_loss": "mse", "activation_checkpointing": True},
        {"decay_step": "state", "decay_per_head": True, "gate": False, "bypass": True, "kd_alpha": 0.7, "lr_new": 1e-2},
    ),
    "mamba": ("paper", None, {"mixer": "mamba", "kd_alpha": 0.7, "lr_new": 1e-2, **NO_STAGE_1}),  # straight to Mamba
}
"""Recipe, options of stage 1 (None: there is none), options of stage 2."""
STAGES = tuple((flavour, stage) for flavour, options in FLAVOURS.items() for stage in (1, 2) if options[stage] is not None)

CUTS = ("zero0", "zero1", "zero2", "zero3", "released")
"""ZeRO stages; `released` is a stage 3 that keeps no parameter whole, however small."""
REFERENCE = "zero1"
"""The cut, on one process, that all others are compared with."""

FAST_TWO = (
    "tuned-1-zero1-dp2",
    "tuned-2-zero1-dp2",
    "tuned-2-released-dp2",
    "paper-1-zero1-tp2",
    "paper-2-zero1-tp2",
    "tuned-2-released-tp2",
)


def _cuts_of_two(flavour: str, size: str) -> tuple[str, ...]:
    """Of the slow tier; tests/topologies has all of tuned's."""
    if flavour in ("paper", "tuned"):
        return CUTS if (flavour, size) == ("paper", "dp2") else (REFERENCE, "released")
    return ("released",) if size == "dp2" else (REFERENCE,)


SLOW_TWO = tuple(
    name
    for flavour, stage in STAGES
    for size in ("dp2", "tp2")
    for cut in _cuts_of_two(flavour, size)
    if (name := f"{flavour}-{stage}-{cut}-{size}") not in FAST_TWO
)
FAST_ONE = (
    *(f"{flavour}-{stage}-{REFERENCE}" for flavour in ("paper", "tuned") for stage in (1, 2)),
    f"mamba-2-{REFERENCE}",
    "tuned-1-zero3",
    "tuned-2-zero3",
)
SLOW_ONE = (
    *(f"{flavour}-{stage}-{REFERENCE}" for flavour in ("tied", "state", "mixed") for stage in (1, 2)),
    *(name for flavour in ("paper", "tuned") for stage in (1, 2) for cut in CUTS if (name := f"{flavour}-{stage}-{cut}") not in FAST_ONE),
    "mamba-2-released",
)
FAST_BF16 = ("tuned-1-zero1-bf16", "tuned-2-zero3-bf16")
SLOW_BF16 = tuple(
    name
    for flavour in ("paper", "tuned")
    for stage in (1, 2)
    for cut in (("zero0", "zero1", "zero2", "zero3") if flavour == "paper" else ("zero1", "zero3"))
    if (name := f"{flavour}-{stage}-{cut}-bf16") not in FAST_BF16
)
"""Ordinary runs by tier and number of processes."""

FAST_RESUMED = ("tuned-1-zero1", "paper-2-zero1", "tuned-1-zero3", "tuned-2-zero3", *FAST_BF16, "tuned-2-zero1-dp2", "paper-2-zero1-tp2")
SLOW_RESUMED = (
    *(name for name in SLOW_ONE if name.startswith(("state", "mixed", "mamba")) or name.endswith(("zero2", "released"))),
    *(name for name in SLOW_BF16 if name.startswith("paper")),
    *(name for name in SLOW_TWO if name.startswith("tuned")),
)
"""Runs of which there is a copy that was interrupted."""

MUTANTS = ("gate", "gate-bf16", "tap", "rate")


def _run(inputs: Path, name: str, **changes) -> StageRun:
    """The ordinary run of that name.  Stage 2 starts from what one process has learnt in stage 1."""
    flavour, stage, cut, *rest = name.split("-")
    recipe, *of_stages = FLAVOURS[flavour]
    own = {"ds_config": str(inputs / "zero3_released.json") if cut == "released" else ds_config(cut)}
    if "bf16" in rest:
        own["dtype"] = "bf16"
    if "tp2" in rest:
        own["tp_size"] = 2
    if stage == "2":
        own["init_from"] = f"{flavour}-1-{REFERENCE}"
    return StageRun(name, int(stage), recipe, own | of_stages[int(stage) - 1] | changes)


def _with_resumed(inputs: Path, name: str) -> list[StageRun]:
    run = _run(inputs, name)
    return [run, StageRun(f"{name}-resumed", run.stage, run.recipe, run.changes, resumes=name)]


def _all(inputs: Path, names: tuple[str, ...], resumed: tuple[str, ...]) -> list[StageRun]:
    return [run for name in names for run in (_with_resumed(inputs, name) if name in resumed else [_run(inputs, name)])]


def _special(inputs: Path) -> list[StageRun]:
    """Runs whose start is not the ordinary one; all but the first few end before their first step."""
    changes = {"init_from": "tuned-1-zero1", "stop_after": 1}
    moved = {"init_from": "moved/stage1", "teacher": "moved/teacher"}
    other = {"teacher": "other-teacher"}

    def run(name, stage=2, *, resumes=None, prepare=None, mutant=None, **its_own):
        its_own = (changes if stage == 2 else {}) | its_own
        return StageRun(name, stage, "tuned", its_own, resumes, prepare, mutant)

    return [
        run("moved-on", resumes="tuned-2-zero1", prepare=write_moved, stop_after=None, **moved),
        run("stage-1-gone", resumes="tuned-2-zero1", stop_after=None, init_from="gone"),
        run("unfinished-start", prepare=write_unfinished, init_from="unfinished"),
        run("older-version", resumes="tuned-2-zero1", prepare=write_older_version, stop_after=None),
        run("no-stage-1", **NO_STAGE_1),
        run("documents-1", 1, reset_at_documents=True),
        run("documents-2", init_from="documents-1", stop_after=None, reset_at_documents=True),
        run("rates-set", decay_init=0.25, lr=1e-9, lr_new=1e-9),
        *(run(f"mutant-{mutant}", mutant=mutant) for mutant in MUTANTS),
        run("mutant-no-stage-1", mutant="gate", **NO_STAGE_1),
        run("mutant-bf16", mutant="gate-bf16", dtype="bf16"),
        run("mutant-probe", prepare=write_other_probe, init_from="other-probe"),
        run("broken-teacher-stage-1", 1, prepare=write_broken_teacher, teacher="broken-teacher"),
        run("broken-teacher-no-stage-1", **NO_STAGE_1 | {"teacher": "broken-teacher"}),
        run("damaged-start", prepare=write_damaged, init_from="damaged"),
        run("other-teacher-start", prepare=write_other_teacher, **other),
        run("other-teacher-resumed", resumes="tuned-2-zero1", stop_after=None, **other),
        run("other-teacher-stage-1-resumed", 1, resumes="tuned-1-zero1", **other),
    ]


def _worlds(inputs: Path) -> list[tuple[int, list[StageRun]]]:
    """Numbers of processes, and runs in an order that minds what DeepSpeed keeps for as long as a process lives.

    An mpu, so tensor parallelism comes last; and ZeRO-3's own form of torch's linear function, whose bias has a gradient of another
    rounding, so that a run of a lower stage and a copy that goes on from it lie on the same side of the first run of ZeRO-3.
    """
    by_size = {tier: [[name for name in names if name.endswith(size)] for size in ("dp2", "tp2")] for tier, names in _TWO.items()}
    pretrained, tied = (StageRun(name, 0, None, {"model_config": f"{config}.json"}) for name, config in _TEACHERS)
    references, others = FAST_ONE[:5], FAST_ONE[5:]
    fast_one = [pretrained, *_all(inputs, references, FAST_RESUMED), *_special(inputs), *_all(inputs, (*others, *FAST_BF16), FAST_RESUMED)]
    fast_two = [run for names in by_size["fast"] for run in _all(inputs, names, FAST_RESUMED)]
    fast_two.append(StageRun("mutant-tp2", 2, "tuned", {"init_from": "tuned-1-zero1", "tp_size": 2}, mutant="gate"))
    slow_one = [tied, *_all(inputs, (*SLOW_ONE, *SLOW_BF16), SLOW_RESUMED)]
    slow_two = [run for names in by_size["slow"] for run in _all(inputs, names, SLOW_RESUMED)]
    return [(1, fast_one), (2, fast_two), (1, slow_one), (2, slow_two)]


_TWO = {"fast": FAST_TWO, "slow": SLOW_TWO}
_TEACHERS = (("pretrained", "teacher"), ("pretrained-tied", "tied-teacher"))


def names_of(fast: tuple[str, ...], slow: tuple[str, ...]) -> list:
    """Test parameters."""
    return [*fast, *(pytest.param(name, marks=pytest.mark.slow) for name in slow)]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """Folder with a corpus, its tokenizer and configs; runs are made in it."""
    folder = tmp_path_factory.mktemp("stages")
    make_stage_inputs(folder)
    return folder


@pytest.fixture(scope="session")
def made(inputs) -> Worlds:
    """`made(name)` is the folder of a run."""
    return Worlds(inputs, _worlds(inputs), make_stage_runs)


@pytest.fixture
def options(inputs, made, tmp_path):
    """A function that makes the options of a run of a stage in a fresh folder, from the teacher or the run `tuned-1-zero1`."""
    made("tuned-1-zero1")

    def make(stage: int, recipe: str = "tuned", **changes) -> dict:
        source = {"init_from": "tuned-1-zero1"} if stage == 2 else {}
        return stage_options(inputs, StageRun("run", stage, recipe, source | {"output_dir": str(tmp_path / "run")} | changes))

    return make
