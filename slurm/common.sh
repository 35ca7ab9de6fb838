# What the templates share; sourced, not submitted. Runs a command so that the scheduler's warning reaches it, and
# queues the job anew when the command has saved itself and left with 75. A warning that came before the command could
# handle it, with `stopped` set by the template's first line, has nothing to save: the job is queued anew as well.

run_and_requeue() {
    local code=0 pid=""
    # Slurm sends USR1 to this script (--signal=B:USR1@120); every rank below the command saves and leaves.
    trap 'stopped=1; [ -z "$pid" ] || kill -USR1 "$pid"' USR1 TERM
    if [ -n "${stopped:-}" ]; then
        code=75
    else
        "$@" &
        pid=$!
        [ -z "${stopped:-}" ] || kill -USR1 "$pid"
        while true; do
            code=0
            wait "$pid" || code=$?
            kill -0 "$pid" 2>/dev/null || break # else the wait was ended by the trap, and the command is still saving
        done
        # The shell reports 128 + the number of the signal once, when a trap ends `wait`; the second wait tells the truth.
        wait "$pid" 2>/dev/null || code=$?
        if [ -n "${stopped:-}" ] && [ "$code" -eq $((128 + $(kill -l USR1))) ]; then
            code=75 # it was ended by the signal: it had not begun
        fi
    fi
    trap - USR1 TERM
    if [ "$code" -eq 75 ]; then
        echo "saved: queued anew as $SLURM_JOB_ID"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}
