# Sourced by ./test and ./quickstart: messages, the build, free ports. Needs bash, curl and python3's standard library only.

say() { printf '%s\n' "$*" >&2; }
die() { say "$(basename "$0"): $*"; exit 1; }

# A clone in another folder compiles the same: without this ccache would not know.
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros

# build PRESET LOG [cmake -D options] [-- TARGETS...]: configures and builds; on a terminal the progress stays on one line.
build() {
    local preset=$1 log=$2 options=()
    shift 2
    while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1"); shift; done
    [ $# -eq 0 ] || shift
    command -v cmake >/dev/null || die "cmake is not installed; run scripts/install-deps"
    mkdir -p "$(dirname "$log")"
    if ! cmake --preset "$preset" "${options[@]}" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        die "configuring the $preset build failed; all of it is in $log"
    fi
    if ! ninja -C "build/$preset" "$@" 2>&1 | tee -a "$log" | progress; then
        grep -E -A8 'error:|FAILED:' "$log" | head -n 40 >&2 || true
        die "building $preset failed; all of it is in $log"
    fi
}

# Shows ninja's "[n/m] ..." lines, each over the one before; without a terminal about one in fifty.
progress() {
    local line
    while IFS= read -r line; do
        [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]] || continue
        if [ -t 2 ]; then printf '\r\033[K  %.100s' "$line" >&2
        elif ((BASH_REMATCH[1] % 50 == 0)); then say "  ${BASH_REMATCH[0]}"; fi
    done
    [ ! -t 2 ] || printf '\r\033[K' >&2
}

# free_ports N: N different ports on which nobody listens, each on a line of its own.
free_ports() {
    python3 -c 'import socket, sys
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
for s in held: print(s.getsockname()[1])' "$1"
}

# wait_for_http URL PID WHAT LOG: until it answers 200, for at most 15 s.
wait_for_http() {
    local i
    for i in $(seq 150); do
        curl -fsS -o /dev/null "$1" 2>/dev/null && return 0
        kill -0 "$2" 2>/dev/null || { tail -n 5 "$4" >&2; die "$3 ended at its start; its log is $4"; }
        sleep 0.1
    done
    die "$3 does not answer on $1 after 15 s; its log is $4"
}
