#!/usr/bin/env bash
# DeepSpeed's own launcher. One machine:
#     scripts/launch/deepspeed.sh run.yaml
# Several machines, started on one of them, which reaches the others by ssh (lines `host slots=8` in the file):
#     HOSTFILE=hosts scripts/launch/deepspeed.sh run.yaml --folder /shared/runs/first
# On CPUs say how many processes: PROCESSES=2. Any engine can be started so, and engine.type: deepspeed by the others.
set -euo pipefail

options=(--no_local_rank) # else it adds an argument that we do not take; LOCAL_RANK is in the environment
[[ -z "${HOSTFILE:-}" ]] || options+=(--hostfile "$HOSTFILE")
[[ -z "${PROCESSES:-}" ]] || options+=(--num_gpus "$PROCESSES")
deepspeed "${options[@]}" --module uniml_rl train "$@" &
launcher=$!

# Neither of DeepSpeed's two launching processes passes a signal on and waits for a checkpoint. So it goes to the ranks
# of this machine; those elsewhere hear of it from them. They end with 75, and then so does the launcher.
tell_the_ranks() {
    for node in $(pgrep -P "$launcher"); do
        pkill -TERM -P "$node"
    done
}
trap tell_the_ranks TERM USR1

code=0
while kill -0 "$launcher" 2>/dev/null; do # a signal ends the wait, not the launcher
    code=0
    wait "$launcher" || code=$?
done
exit "$code"
