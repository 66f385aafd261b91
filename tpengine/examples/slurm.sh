#!/bin/bash
# Train under SLURM, and go on by itself after a preemption or the end of its time:
#
#     sbatch slurm.sh --preset llama_1b --data.path tokens.bin --run-dir runs/llama --resume
#
# The same flags begin the run and continue it. To start ranks by torchrun, set --ntasks-per-node 1 and see the README.
#
#SBATCH --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 --cpus-per-task 12 --time 24:00:00
#SBATCH --requeue --open-mode append
# 120 s before the end of its time, this script alone gets USR1; before a preemption too, where SLURM's configuration
# has PreemptParameters=send_user_signal.
#SBATCH --signal B:USR1@120

step=
notices=0
# srun passes the signal on. The ranks save at the end of their step, and leave.
notice() { notices=$((notices + 1)); [ -z "$step" ] || kill -USR1 "$step"; }
trap notice USR1

if [ "$SLURM_NTASKS_PER_NODE" = 1 ]; then
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    launcher=(torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${RANKS_PER_NODE:-8}" --rdzv-backend c10d
        --rdzv-endpoint "$first:29500" --rdzv-id "$SLURM_JOB_ID"
        --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1)
else
    launcher=(python)
fi
[ "$notices" != 0 ] || { srun "${launcher[@]}" -m tpengine.train "$@" & step=$!; }

# A notice ends a wait before the step has ended: wait again.
code=138
waited=-1
while [ -n "$step" ] && [ "$waited" != "$notices" ]; do
    waited=$notices
    wait "$step"
    code=$?
done
# Whatever ended after a notice, but for a run that is done, goes on in the same job. An error goes nowhere.
if [ "$notices" != 0 ] && [ "$code" != 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
