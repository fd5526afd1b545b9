# shellcheck shell=bash
# Sourced by the sbatch files: `launch SCRIPT OPTIONS...` runs one task per rank, without the deepspeed launcher, which does not pass on
# the signals by which a rank saves.
#
# Slurm sends USR1 some minutes before the time limit (--signal): every rank then saves at the same step and ends with status 0, and the job
# puts itself back into the queue.  So it does after a failure, as a node may have been at fault, unless it has failed at this step
# before: FOLDER.failed says where.  It resumes whatever its folder holds.
source scripts/slurm/site.sh

stopped=no # whether Slurm has asked for an end
trap 'stopped=yes' USR1

launch() {
    local script=$1 folder address port status=0 step
    shift
    if [ -z "${SLURM_JOB_NODELIST:-}" ]; then
        echo "this is a job for Slurm: submit it with sbatch; without Slurm, call the deepspeed launcher (scripts/slurm/README.md)" >&2
        exit 2
    fi
    folder=$(output_dir "$@")
    address=${MASTER_ADDR:-$(first_node)}
    port=${MASTER_PORT:-$(free_port)}
    mkdir -p "$(dirname "$folder")"
    rm -f "$folder.refused"

    # A rank that is not yet training ignores USR1, which would end it without a save; so the signal is repeated until the step ends.
    # --cpus-per-task is said again because srun, from Slurm 22.05 on, does not take it from the job.
    # shellcheck disable=SC2016 # the inner shell is to expand them
    MASTER_ADDR=$address MASTER_PORT=$port OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}} \
        MEGAHEDGE_REFUSED_FILE=$folder.refused \
        srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${srun_options[@]}" bash -c \
        'trap "" USR1; RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID exec python "$@"' \
        task "$script" --resume "$@" &
    step=$!
    while kill -0 "$step" 2>/dev/null; do
        if [ $stopped = yes ]; then kill -USR1 "$step" 2>/dev/null || true; fi
        sleep 1 &
        wait $! || true # not for the step: a signal just before that would go unnoticed until its end
    done
    wait "$step" || status=$?
    if [ "$status" -eq 0 ]; then
        rm -f "$folder.failed"
        if [ ! -f "$folder/summary.json" ]; then requeue_if_asked; fi
    elif may_try_again "$folder" "$status"; then
        requeue "failed with status $status"
    fi
    return "$status"
}

# What there is to do for a job that has been asked to end, between two runs or where one has saved.
requeue_if_asked() {
    if [ $stopped = yes ] || preempted; then requeue "saved before the end of the run"; fi
}

# Where the ranks meet: the first node of the allocation, on which this file runs as well.
first_node() {
    local nodes
    nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    echo "${nodes%%$'\n'*}" # under pipefail `head` would end a job of many nodes by SIGPIPE
}

# A port there that nobody listens at, below those that the system gives away; jobs that share a node begin their search apart.
free_port() {
    local port=$((20000 + SLURM_JOB_ID % 12000))
    while (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
    echo "$port"
}

# A job of an array by its place there: the number of one of its tasks is also that of the array.
job_name() {
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; else echo "$SLURM_JOB_ID"; fi
}

# Ends this script as well: what follows in it is for the next start.
requeue() {
    echo "$1; going back into the queue"
    scontrol requeue "$(job_name)"
    exit 0
}

# Of a job that is preempted with a time of grace, Slurm sends TERM to the ranks alone, and takes it to be done when they have saved.
preempted() {
    [[ $(scontrol show job --oneliner "$(job_name)") == *" PreemptTime="[0-9]* ]]
}

# Whether a failure deserves another start: not where a rank has refused its options or inputs (status 2, and a file, as srun tells the
# status of those that it ended), the run has ended (diverged), somebody has cancelled the job, or it has failed at this step before.
may_try_again() {
    local folder=$1 status=$2 step before
    if [ "$status" -eq 2 ] || [ -f "$folder.refused" ] || [ -f "$folder/summary.json" ]; then return 1; fi
    [[ $(scontrol show job --oneliner "$(job_name)") == *" JobState=RUNNING "* ]] || return 1
    if preempted; then return 0; fi # before it could save
    step=$(last_step "$folder")
    before=$(cat "$folder.failed" 2>/dev/null || true)
    if [ "$before" = "$(job_name) $step" ]; then
        echo "failed after step $step for the second time; staying out of the queue" >&2
        return 1
    fi
    echo "$(job_name) $step" >"$folder.failed"
}

# The last step that a run has logged, 0 where there is none.
last_step() {
    local line step=0
    while read -r line; do
        if [[ $line =~ \"step\":\ ([0-9]+) ]]; then step=${BASH_REMATCH[1]}; fi
    done < <(tail -n 2 "$1/metrics.jsonl" 2>/dev/null)
    echo "$step"
}

# The folder that the options name last; one within a --config file is not seen here.
output_dir() {
    local folder=
    while [ $# -gt 0 ]; do
        case $1 in
            --output_dir=*) folder=${1#*=} ;;
            --output_dir) folder=${2:-} ;;
            --config | --config=*) folder= ;;
        esac
        shift
    done
    if [ -z "$folder" ]; then
        echo "the options of a job must name its --output_dir, after --config where there is one" >&2
        exit 2
    fi
    echo "${folder%/}"
}
