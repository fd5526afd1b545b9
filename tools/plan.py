"""Plan a run of stage 1 or 2: memory of each GPU part by part, whether it fits or what to change, steps and days.

python tools/plan.py --stage 2 --teacher pythia-1b --recipe tuned --ds_config ds_configs/zero1.json --gpu A100-80G --num_gpus 8

Understands the options of scripts/stage1.py and scripts/stage2.py; needs neither a GPU nor a network, weights or data.
"""

import argparse
import json
import sys

from megahedge.utils.cli import parse_options, run_main
from megahedge.utils.errors import InputError
from megahedge.utils.words import either


def named_stage(arguments: list[str]) -> str:
    """What --stage says, which decides about all other options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--stage", default="2", nargs="?", const="")
    return parser.parse_known_args(arguments)[0].stage


def main() -> None:
    """Entry point."""
    from megahedge.stages import plan  # not at the top: it takes seconds

    stage = named_stage(sys.argv[1:])
    if stage not in map(str, plan.PLANS):
        raise InputError(f"--stage={stage} is not known; use {either(plan.PLANS)}")
    description = "Plan a run: memory of each GPU, whether it fits or what to change, steps and days."
    options = parse_options(plan.PLANS[int(stage)], prog="plan.py", description=description)
    found = plan.plan(options)
    changes = [] if found.fits else plan.changes_that_fit(found)
    if options.json:
        print(json.dumps(plan.record(found, changes), indent=2))
    else:
        print("\n".join(plan.report(found, changes)))


if __name__ == "__main__":
    run_main(main)
