# What the templates share; sourced, not submitted. Runs a command so that the scheduler's warning reaches it, and
# queues the job anew when the command has saved itself and left with 75.

run_and_requeue() {
    local code=0 pid
    "$@" &
    pid=$!
    # Slurm sends USR1 to this script (--signal=B:USR1@120); every rank below the command saves and leaves.
    trap 'kill -USR1 "$pid"' USR1 TERM
    while true; do
        code=0
        wait "$pid" || code=$?
        kill -0 "$pid" 2>/dev/null || break # else the wait was ended by the trap, and the command is still saving
    done
    trap - USR1 TERM
    # The shell reports 128 + the number of the signal once, when a trap ends `wait`; the second wait tells the truth.
    wait "$pid" 2>/dev/null || code=$?
    if [ "$code" -eq 75 ]; then
        echo "saved: queued anew as $SLURM_JOB_ID"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}
