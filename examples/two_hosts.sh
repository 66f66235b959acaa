#!/bin/sh
# Two hosts on one machine: network namespaces with a cable between them, and torchrun in each, as on two machines.
# Needs root and iproute2; leaves nothing behind.
#
#     sudo examples/two_hosts.sh                       two_hosts.py on 2 ranks per host
#     sudo PYTHON=.venv/bin/python examples/two_hosts.sh my_program.py its arguments
set -eu
python=${PYTHON:-python3}
ranks=${RANKS:-2}
[ $# -gt 0 ] || set -- "$(dirname "$0")/two_hosts.py"

first=unisono-$$-0 second=unisono-$$-1 # names that no other run has
pids=
remove() {
    trap - EXIT INT TERM
    # torchrun ends its ranks when it is told to end
    if [ -n "$pids" ]; then kill $pids 2>/dev/null || true; fi
    wait
    ip netns delete "$first" 2>/dev/null || true
    ip netns delete "$second" 2>/dev/null || true
}
trap remove EXIT
trap 'exit 130' INT TERM

ip netns add "$first"
ip netns add "$second"
ip -n "$first" link add eth0 type veth peer name eth0 netns "$second"
ip -n "$first" address add 10.99.0.1/24 dev eth0
ip -n "$second" address add 10.99.0.2/24 dev eth0
for host in "$first" "$second"; do
    ip -n "$host" link set lo up
    ip -n "$host" link set eth0 up
done

# From here on it is what one would type on two machines, but for `ip netns exec`.
run() {
    host=$1 number=$2 address=$3
    shift 3
    exec ip netns exec "$host" "$python" -m torch.distributed.run --nnodes 2 --node-rank "$number" \
        --nproc-per-node "$ranks" --master-addr 10.99.0.1 --master-port 29500 --local-addr "$address" "$@"
}
run "$first" 0 10.99.0.1 "$@" &
pids=$!
run "$second" 1 10.99.0.2 "$@" &
pids="$pids $!"
for pid in $pids; do wait "$pid"; done
