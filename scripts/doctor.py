"""Say what this machine, or job, is fit for: versions, devices, backends and why not others, ranks, data, teacher, memory, disk.

python scripts/doctor.py --data_path data/small --teacher scripts/quickstart/teacher --output_dir runs/stage1 --dtype fp32
deepspeed --num_gpus 8 scripts/doctor.py --data_path data/openwebtext --teacher EleutherAI/pythia-1b

Started as a stage is started, by the deepspeed launcher or one srun task a rank, it tries an all-reduce over all ranks, too.
Understands the options of data and runs that the stages understand.  Ends with status 1 where something keeps a run from training;
warnings alone leave it at 0.
"""

from megahedge.utils.cli import parse_options, run_main


def main() -> int:
    """Entry point."""
    from megahedge.doctor.options import DoctorOptions

    options = parse_options(DoctorOptions, prog="doctor.py", description="Say what this machine, or job, is fit for.")
    try:
        from megahedge.doctor.doctor import doctor  # not at the top: it takes seconds
    except Exception as error:  # whatever a broken package raises
        from megahedge.doctor.without_packages import doctor

        return doctor(options, error)
    return doctor(options)


if __name__ == "__main__":
    run_main(main)
