# Sourced by the sbatch files: `launch SCRIPT OPTIONS...` runs one task per rank, without the deepspeed launcher, which does not pass on
# the signals by which a rank saves.  Slurm sends USR1 some minutes before the time limit (--signal): every rank then saves at the same
# step and ends with status 0, and the job puts itself back into the queue.  It resumes whatever its folder holds.

launch() {
    local address port script=$1 job=$SLURM_JOB_ID
    shift
    # by its place in an array: the number of one of its tasks is also that of the array
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
    if [ -f .venv/bin/activate ]; then source .venv/bin/activate; fi # else the environment in which sbatch was called, or the container's
    address=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    address=${address%%$'\n'*} # the first; under pipefail `head` would end a job of many nodes by SIGPIPE
    port=$((20000 + SLURM_JOB_ID % 12000)) # jobs that share a node meet at ports of their own, below those that the system gives away
    export MASTER_ADDR=${MASTER_ADDR:-$address} MASTER_PORT=${MASTER_PORT:-$port}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

    # A rank that is not yet training ignores USR1, which would end it without a save; so the signal is repeated until the step ends.
    # --cpus-per-task is said again because srun, from Slurm 22.05 on, does not take it from the job.
    local stopped=no status=0 step
    trap 'stopped=yes' USR1
    srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" bash -c \
        'trap "" USR1; RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID exec python "$@"' \
        task "$script" --resume "$@" &
    step=$!
    while kill -0 "$step" 2>/dev/null; do
        if [ $stopped = yes ]; then kill -USR1 "$step" 2>/dev/null || true; fi
        sleep 3 &
        wait $! || true # not for the step: a signal just before that would go unnoticed until its end
    done
    wait "$step" || status=$?
    if [ "$status" -eq 0 ] && { [ $stopped = yes ] || preempted "$job"; }; then
        echo "saved before the end of the run; going back into the queue"
        scontrol requeue "$job"
    fi
    return "$status"
}

# Of a job that is preempted with a time of grace, Slurm sends TERM to the ranks alone, and takes it to be done when they have saved.
preempted() {
    [[ $(scontrol show job --oneliner "$1") == *" PreemptTime="[0-9]* ]]
}
