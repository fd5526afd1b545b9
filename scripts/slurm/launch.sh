# Sourced by the sbatch files: `launch SCRIPT OPTIONS...` runs one task per rank, without the deepspeed launcher, which does not pass on
# the signals by which a rank saves.  Slurm sends USR1 some minutes before the time limit (--signal) or on preemption: every rank then
# saves at the same step and ends with status 0, and the job puts itself back into the queue.  It resumes whatever its folder holds.

launch() {
    local address port script=$1
    shift
    source .venv/bin/activate
    address=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    port=$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a node meet at ports of their own
    export MASTER_ADDR=${MASTER_ADDR:-$address} MASTER_PORT=${MASTER_PORT:-$port} OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

    local stopped=no status=0
    trap 'stopped=yes; kill -USR1 "$step"' USR1
    srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID exec python "$@"' \
        task "$script" --resume "$@" &
    local step=$!
    # a trap ends `wait` before the step itself has ended
    while true; do
        status=0
        wait "$step" || status=$?
        kill -0 "$step" 2>/dev/null || break
    done
    if [ $stopped = yes ] && [ "$status" -eq 0 ]; then
        echo "saved before the time limit; going back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$status"
}
