# Sourced by the scripts. Runs a command, passes the scheduler's signal on to it, and requeues the job when the command
# has saved a checkpoint and exited with 75. A signal that came before the command could handle it, with `stopped` set
# by the script's first line, has nothing to save: the job is requeued as well.

run_and_requeue() {
    local code=0 pid=""
    # Slurm sends USR1 to this script (--signal=B:USR1@120); every rank below the command saves and exits.
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
            kill -0 "$pid" 2>/dev/null || break # else the trap interrupted the wait, and the command is still saving
        done
        # The shell reports 128 + the signal's number when a trap interrupts `wait`; the second wait has the exit code.
        wait "$pid" 2>/dev/null || code=$?
        if [ -n "${stopped:-}" ] && [ "$code" -eq $((128 + $(kill -l USR1))) ]; then
            code=75 # the signal ended it before it could handle signals
        fi
    fi
    trap - USR1 TERM
    if [ "$code" -eq 75 ]; then
        echo "saved: requeued as $SLURM_JOB_ID"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}
