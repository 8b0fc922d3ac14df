# Shared by scripts/demo, scripts/test and scripts/fuzz: packages, steps with logs, presets. Sourced, not run.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=$(nproc)
logs=build/logs
mkdir -p "$logs"
started=$SECONDS

say() { echo "[$(basename "$0")] $*" >&2; }
die() { say "$*"; exit 1; }
took() { printf '%d min %02d s' $((($SECONDS - $1) / 60)) $((($SECONDS - $1) % 60)); }

# packages SECTION…: the lines of these sections of packaging/debian-packages.txt
packages() {
  local section
  for section in "$@"; do
    awk -v want="[$section]" '/^#/ || NF == 0 { next } /^\[/ { on = ($0 == want); next } on { print $1 }' packaging/debian-packages.txt
  done
}

# install_packages SECTION…: installs through apt what is missing; without apt it says so and goes on
install_packages() {
  local missing=() name
  if ! command -v dpkg-query > /dev/null || ! command -v apt-get > /dev/null; then
    say "no apt here; going on with what is installed. Needed (Debian's names): $(packages "$@" | tr '\n' ' ')"
    return 0
  fi
  for name in $(packages "$@"); do
    dpkg-query -W -f '${db:Status-Status}' "$name" 2> /dev/null | grep -qx installed || missing+=("$name")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  local as_root=()
  if [ "$(id -u)" != 0 ]; then
    command -v sudo > /dev/null || die "not installed, and there is no sudo: ${missing[*]}"
    as_root=(sudo)
  fi
  say "installing through apt-get: ${missing[*]}"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -y -q)
  step "apt-get update" "${apt[@]}" update
  step "apt-get install" "${apt[@]}" install --no-install-recommends "${missing[@]}"
}

# step NAME COMMAND…: runs it with its output in a log, says how long it took, shows the log's end if it fails
step() {
  local name=$1 begin=$SECONDS
  shift
  local log="$logs/${name//[^a-zA-Z0-9_-]/_}.log"
  say "$name …"
  if ! "$@" > "$log" 2>&1 < /dev/null; then
    tail -n 60 "$log" >&2
    die "$name failed after $(took "$begin"); the whole log is $log"
  fi
  say "$name: done in $(took "$begin")"
}

# configure PRESET option…
configure() {
  local preset=$1
  shift
  local launcher=${MOEKIT_LAUNCHER-}
  [ -n "$launcher" ] || launcher=$(command -v ccache || true)
  MOEKIT_LAUNCHER=$launcher step "configure $preset" cmake --preset "$preset" "$@"
}
build() {  # build PRESET [target…]
  local preset=$1
  shift
  step "build $preset" cmake --build "build/$preset" -j "$jobs" ${1:+--target "$@"}
}
