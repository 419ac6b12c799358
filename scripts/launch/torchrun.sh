#!/usr/bin/env bash
# One machine, a process for each GPU:
#     scripts/launch/torchrun.sh run.yaml
# Several machines, this on each of them (they need the same files, and a folder for the run that all see):
#     NODES=2 FIRST_NODE=10.0.0.1 scripts/launch/torchrun.sh run.yaml --folder /shared/runs/first
# On CPUs say how many processes: PROCESSES=2.
set -euo pipefail

# torchrun passes a SIGTERM on and kills what is left after this many seconds (30 before torch knew the variable): an
# iteration and a checkpoint must fit in.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"

# A crashed or killed process starts all again, from the last checkpoint. Once the number is used up, the exit code is
# that of the processes: 75 asks to be started again, 2 is a mistake.
options=(--nproc-per-node "${PROCESSES:-gpu}" --max-restarts "${RESTARTS:-0}")
if [[ "${NODES:-1}" == 1 ]]; then
    options+=(--standalone) # a free port of its own, so that two runs on one machine do not meet
else
    options+=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-id "${RUN_ID:-uniml-rl}"
        --rdzv-endpoint "${FIRST_NODE:?the address of the first machine}:${PORT:-29500}")
    if [[ -n "${LOCAL_ADDRESS:-}" ]]; then
        # Which of its addresses the others shall use. torchrun knows the first machine by its name alone.
        [[ "$LOCAL_ADDRESS" == "$FIRST_NODE" ]] && first=true || first=false
        options+=(--local-addr "$LOCAL_ADDRESS" --rdzv-conf "is_host=$first")
    fi
fi

exec python -m uniml_rl.torchrun "${options[@]}" -m uniml_rl train "$@" # exec: signals reach torchrun itself
