"""Stage 1: learn Hedgehog feature maps so that linear attention mimics the teacher's softmax attention.

So far this plans a run: options, teacher, data and sizes are checked and the header is printed.
"""

from megahedge.config.options import Stage1Options
from megahedge.data.blending import parse_data_path
from megahedge.data.meta import find_split
from megahedge.data.tokenizer import load_tokenizer
from megahedge.models.hf_weights import load_config, resolve_pretrained
from megahedge.stages.base import Plan, plan_run, print_header
from megahedge.utils.errors import RunError


def stage1(options: Stage1Options) -> None:
    """Plan stage 1.  Raises InputError for what a user can mend, and RunError where training would begin."""
    plan = plan_stage1(options)
    print_header("stage1", plan)
    if not options.dry_run:
        raise RunError("this version has no Hedgehog mixer yet, so stage 1 can be planned (--dry_run) but not trained")


def plan_stage1(options: Stage1Options) -> Plan:
    """Check the data before the teacher is looked up or downloaded, then everything else."""
    for _, prefix in parse_data_path(options.data_path):
        find_split(prefix, "train")
    folder = resolve_pretrained(options.teacher, options.teacher_revision)
    tokenizer = load_tokenizer(str(folder))
    output_dir = f"runs/stage1-{options.teacher.rstrip('/').split('/')[-1]}-{options.recipe}"
    return plan_run(options, load_config(folder), output_dir, tokenizer, f"the teacher {options.teacher}")
