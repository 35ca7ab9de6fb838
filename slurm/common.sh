# Sourced by the scripts. Runs a command, passes the scheduler's signal on to it, and requeues the job when the command
# has saved a checkpoint and exited with 75.

run_and_requeue() {
    local code=0 pid
    "$@" &
    pid=$!
    # Slurm sends USR1 to this script (--signal=B:USR1@120); every rank below the command saves and exits.
    trap 'kill -USR1 "$pid"' USR1 TERM
    while true; do
        code=0
        wait "$pid" || code=$?
        kill -0 "$pid" 2>/dev/null || break # else the trap interrupted the wait, and the command is still saving
    done
    trap - USR1 TERM
    # The shell reports 128 + the number of the signal when a trap interrupts `wait`; the second wait has the exit code.
    wait "$pid" 2>/dev/null || code=$?
    if [ "$code" -eq 75 ]; then
        echo "saved: requeued as $SLURM_JOB_ID"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}
