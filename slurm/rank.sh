# Run by srun for each rank: tells torch of the world that Slurm has started, and becomes the command.

export WORLD_SIZE="$SLURM_NTASKS" RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID"
export LOCAL_WORLD_SIZE="${SLURM_NTASKS_PER_NODE:-1}"
exec "$@"
