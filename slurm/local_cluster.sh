#!/usr/bin/env bash
# Start a real Slurm of several nodes on one machine, to try the package without a cluster, and for its tests.
#
# Keys, state, logs, sockets and database are in one folder. The daemons belong to the user who starts them, and listen
# on this machine alone as far as Slurm allows. `down` stops what `up` started and nothing else.

set -euo pipefail
export PYTHONSAFEPATH=1 # a file beside whoever calls this must not be imported
umask 077

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
LINK="${GSPO_HPC_SLURM:-$REPO/.cache/slurm}"
NODES=4 GPUS=2 ACCOUNTING=no USER_SIGNAL=yes KILL_WAIT=5 REQUEUE_DELAY=120

usage() {
    cat <<EOF
usage: bash slurm/local_cluster.sh up|down|status|env [options]

Starts a Slurm of several nodes on this machine: munge, slurmctld and one slurmd per node, with fake GPUs.
Missing packages are installed with apt-get, which needs root or sudo. The daemons run as you.

  up       start it, unless it is running
  down     cancel its jobs and stop everything that up started
  status   show daemons, nodes and jobs; exit code 3 if it is not running
  env      print the line that points Slurm's commands in your shell to it: eval "\$(bash slurm/local_cluster.sh env)"

options of up:
  --nodes N            number of nodes, n1 to nN (default: $NODES)
  --gpus N             fake GPUs per node (default: $GPUS)
  --accounting         start slurmdbd and its database, too, so that sacct works
  --no-user-signal     preempt with SIGTERM only, as most clusters do, without the signal of --signal before it
  --kill-wait SECONDS  time from SIGTERM to SIGKILL (default: $KILL_WAIT)
  --requeue-delay SECONDS  time that a requeued job is held (default: $REQUEUE_DELAY, as in Slurm)

Partitions: low (preempted by requeue, 20 s of grace), low-now (the same without grace), high (preempts both).

environment variables:
  GSPO_HPC_SLURM  link to the folder of this Slurm (default: .cache/slurm in the project)
EOF
}

say() { printf '== %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit "${2:-1}"; }

# ---------------------------------------------------------------------------------------------------- install
install_missing() {
    local wanted=() sudo=() policy=/usr/sbin/policy-rc.d
    command -v munged >/dev/null || wanted+=(munge)
    command -v slurmctld >/dev/null || wanted+=(slurmctld)
    command -v slurmd >/dev/null || wanted+=(slurmd)
    command -v srun >/dev/null || wanted+=(slurm-client)
    if [ "$ACCOUNTING" = yes ]; then
        command -v slurmdbd >/dev/null || wanted+=(slurmdbd)
        command -v mariadbd >/dev/null || wanted+=(mariadb-server)
    fi
    [ ${#wanted[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null || die "${wanted[*]} not found, and no apt-get to install them with"
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || die "${wanted[*]} must be installed, by root or with sudo"
        sudo=(sudo)
    fi
    say "installing ${wanted[*]}"
    # The packages would start daemons of their own, for the whole machine.
    local barred=no
    if [ ! -e "$policy" ]; then
        barred=yes
        printf '#!/bin/sh\nexit 101\n' | "${sudo[@]}" install -m 755 /dev/stdin "$policy"
    fi
    local code=0
    { "${sudo[@]}" apt-get update -qq &&
        "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null; } || code=$?
    [ "$barred" = no ] || "${sudo[@]}" rm -f "$policy"
    [ "$code" = 0 ] || die "apt-get could not install ${wanted[*]}"
}

# ---------------------------------------------------------------------------------------------------- configuration
free_ports() { # N ports that are free now
    python3 - "$1" <<'PY'
import socket, sys
held = [socket.socket() for _ in range(int(sys.argv[1]))]
for one in held:
    one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in held))
PY
}

configure() {
    local host ports port user memory
    host="$(hostname -s)" user="$(id -un)"
    memory=$(($(awk '/MemTotal/ {print $2}' /proc/meminfo) / 1024))
    read -ra ports <<<"$(free_ports $((NODES + 2)))"
    mkdir -p "$DIR"/{state,log,dev}
    {
        cat <<EOF
ClusterName=gspo_hpc
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$DIR/munge.socket,cred_expire=$REQUEUE_DELAY
CredType=cred/munge
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool-%n
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd-%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd-%n.log
# Nodes are as large as this file says: they share one machine.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
GresTypes=gpu
ReturnToService=2
JobRequeue=1
KillWait=$KILL_WAIT
SlurmdTimeout=10
SlurmctldTimeout=30
InactiveLimit=0
MinJobAge=600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
EOF
        [ "$USER_SIGNAL" = no ] || echo "SlurmctldParameters=preempt_send_user_signal"
        if [ "$ACCOUNTING" = yes ]; then
            cat <<EOF
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=${ports[1]}
AccountingStoragePass=$DIR/munge.socket
JobAcctGatherType=jobacct_gather/linux
EOF
        fi
        for number in $(seq "$NODES"); do
            port=${ports[$((number + 1))]}
            echo "NodeName=n$number NodeHostname=$host NodeAddr=127.0.0.1 Port=$port" \
                "CPUs=$((GPUS * 2)) RealMemory=$memory Gres=gpu:$GPUS State=UNKNOWN"
        done
        cat <<EOF
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=low Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=low-now PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=high PriorityTier=10 PreemptMode=OFF
EOF
    } >"$DIR/slurm.conf"
    if [ "$GPUS" -gt 0 ]; then
        for number in $(seq 0 $((GPUS - 1))); do : >"$DIR/dev/gpu$number"; done
        echo "Name=gpu File=$DIR/dev/gpu[0-$((GPUS - 1))]" >"$DIR/gres.conf"
    fi
    if [ "$ACCOUNTING" = yes ]; then
        cat >"$DIR/slurmdbd.conf" <<EOF
AuthType=auth/munge
AuthInfo=socket=$DIR/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=${ports[1]}
SlurmUser=$user
PidFile=$DIR/slurmdbd.pid
LogFile=$DIR/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=$user
StorageLoc=slurm
EOF
    fi
}

# ---------------------------------------------------------------------------------------------------- daemons
alive() { # whether the process of this pid file is still the daemon that was started with this folder
    local pid
    pid="$(cat "$DIR/$1.pid" 2>/dev/null)" && [ -n "$pid" ] || return 1
    tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | grep -qxF "GSPO_HPC_SLURM_DIR=$DIR"
}

wait_for() { # seconds what command...
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || die "$what did not start; its log is in $DIR/log"
        sleep 0.2
    done
}

start_database() {
    alive mariadbd && return
    if [ ! -d "$DIR/db" ]; then
        mariadb-install-db --no-defaults --datadir="$DIR/db" --user="$(id -un)" \
            --auth-root-authentication-method=normal --skip-test-db >"$DIR/log/mariadb-install.log" 2>&1
    fi
    mariadbd --no-defaults --datadir="$DIR/db" --socket="$DIR/db.socket" --pid-file="$DIR/mariadbd.pid" \
        --skip-networking --user="$(id -un)" --innodb-buffer-pool-size=32M </dev/null >"$DIR/log/mariadbd.log" 2>&1 &
    disown
    wait_for 60 "the database" mariadb --no-defaults --socket="$DIR/db.socket" -u root -e "select 1"
    mariadb --no-defaults --socket="$DIR/db.socket" -u root -e "create database if not exists slurm;
        create user if not exists '$(id -un)'@'localhost'; grant all on slurm.* to '$(id -un)'@'localhost'"
}

start() {
    export GSPO_HPC_SLURM_DIR="$DIR" SLURM_CONF="$DIR/slurm.conf"
    if ! alive munged; then
        [ -e "$DIR/munge.key" ] || dd if=/dev/urandom of="$DIR/munge.key" bs=1024 count=1 status=none
        # --force: the folder is nobody else's, which munged takes for a mistake.
        munged --force --key-file="$DIR/munge.key" --socket="$DIR/munge.socket" --pid-file="$DIR/munged.pid" \
            --seed-file="$DIR/munge.seed" --log-file="$DIR/log/munged.log" 2>>"$DIR/log/munged.log"
    fi
    if [ -e "$DIR/slurmdbd.conf" ]; then
        start_database
        alive slurmdbd || MYSQL_UNIX_PORT="$DIR/db.socket" slurmdbd
        wait_for 30 slurmdbd sacctmgr -n show cluster
        sacctmgr -i add cluster gspo_hpc >/dev/null 2>&1 || true # it is there already
    fi
    alive slurmctld || slurmctld -f "$DIR/slurm.conf"
    wait_for 30 slurmctld scontrol ping
    for node in $(node_names); do
        alive "slurmd-$node" || slurmd -N "$node" -f "$DIR/slurm.conf"
    done
    wait_for 60 "one of the nodes" all_idle
}

node_names() { sed -n 's/^NodeName=\([^ ]*\) .*/\1/p' "$DIR/slurm.conf"; }
all_idle() { [ "$(sinfo -h -N -p high -o '%N %t' | grep -cE ' (idle|mix|alloc)$')" = "$(node_names | wc -l)" ]; }

stop_one() { # pid-file
    local pid
    alive "$1" || return 0
    pid="$(cat "$DIR/$1.pid")"
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 100); do
        [ -e "/proc/$pid" ] || return 0
        sleep 0.1
    done
    kill -9 "$pid" 2>/dev/null || true
}

ours() { # process ids of everything that runs under this Slurm
    grep -lzxsF "GSPO_HPC_SLURM_DIR=$DIR" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 || true
}

up() {
    local conflict
    if [ -d "$LINK" ]; then
        DIR="$(readlink -f "$LINK")"
        conflict="$(cat "$DIR/options")"
        [ "$conflict" = "$OPTIONS" ] || [ -z "$GIVEN" ] || die "it was started with other options ($conflict): run down first"
    else
        rm -f "$LINK" # of a folder that is gone, with /tmp
        mkdir -p "$(dirname "$LINK")"
        # Unix sockets want short paths, and munge one that everybody may enter.
        DIR="$(mktemp -d /tmp/gspo-slurm-XXXXXX)"
        ln -s "$DIR" "$LINK"
    fi
    install_missing
    [ -e "$DIR/slurm.conf" ] || configure
    echo "$OPTIONS" >"$DIR/options"
    start
    say "Slurm runs: $(node_names | wc -l) nodes; point a shell to it with: eval \"\$(bash slurm/local_cluster.sh env)\""
}

down() {
    local left
    export GSPO_HPC_SLURM_DIR="$DIR" SLURM_CONF="$DIR/slurm.conf"
    if alive slurmctld; then
        scancel --full --signal=KILL --user="$(id -un)" 2>/dev/null || true
        scancel --user="$(id -un)" 2>/dev/null || true
    fi
    for node in $(node_names); do stop_one "slurmd-$node"; done
    for name in slurmctld slurmdbd mariadbd munged; do stop_one "$name"; done
    left="$(ours)"
    # shellcheck disable=SC2086 # a list of numbers
    [ -z "$left" ] || kill -9 $left 2>/dev/null || true
    rm -rf "$DIR"
    rm -f "$LINK"
    say "Slurm is stopped, and its folder is removed"
}

status() {
    export SLURM_CONF="$DIR/slurm.conf"
    for name in munged slurmdbd mariadbd slurmctld $(node_names | sed 's/^/slurmd-/'); do
        case "$name" in slurmdbd | mariadbd) [ -e "$DIR/slurmdbd.conf" ] || continue ;; esac
        if alive "$name"; then echo "$name runs"; else echo "$name is down"; fi
    done
    if alive slurmctld; then sinfo && squeue; fi
}

# ---------------------------------------------------------------------------------------------------- command line
number() { [[ "${2:-}" =~ ^[0-9]+$ ]] || die "$1 must be a number; found '${2:-}'" 2; }

COMMAND="${1:-}" GIVEN=""
[ $# -eq 0 ] || shift
while [ $# -gt 0 ]; do
    GIVEN=yes
    case "$1" in
        --nodes) number "$@" && NODES=$2 && shift ;;
        --gpus) number "$@" && GPUS=$2 && shift ;;
        --kill-wait) number "$@" && KILL_WAIT=$2 && shift ;;
        --requeue-delay) number "$@" && REQUEUE_DELAY=$2 && shift ;;
        --accounting) ACCOUNTING=yes ;;
        --no-user-signal) USER_SIGNAL=no ;;
        --help | -h) usage && exit 0 ;;
        *) usage >&2 && die "no option $1" 2 ;;
    esac
    shift
done
OPTIONS="nodes $NODES, gpus $GPUS, accounting $ACCOUNTING, user signal $USER_SIGNAL, kill wait $KILL_WAIT, requeue delay $REQUEUE_DELAY"
case "$COMMAND" in
    up) up ;;
    down | status | env)
        if [ ! -e "$LINK/slurm.conf" ]; then
            echo "this Slurm is not running" >&2
            if [ "$COMMAND" = down ]; then exit 0; else exit 3; fi
        fi
        DIR="$(readlink -f "$LINK")"
        if [ "$COMMAND" = env ]; then echo "export SLURM_CONF=$DIR/slurm.conf"; else "$COMMAND"; fi
        ;;
    --help | -h | help) usage ;;
    *) usage >&2 && exit 2 ;;
esac
