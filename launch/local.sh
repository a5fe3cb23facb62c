#!/usr/bin/env bash
# Runs one command with agentjax's Python on this machine, in the folder it is called from.
#
#   launch/local.sh [--dry_run] [--devices=N] COMMAND...
#   launch/local.sh -m agentjax.train --config=configs/quickstart.py --workdir=runs/a
#
# COMMAND begins with -m MODULE, -c CODE or a file.py. --devices=N forces N host devices on a CPU
# machine, to try a sharded config before a pod. --dry_run prints the command and runs nothing.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
. "$root/launch/common.sh"

dry_run=false
devices=""
while [ $# -gt 0 ]; do
  case "$1" in
    --help) usage; exit 0 ;;
    --dry_run) dry_run=true; shift ;;
    --devices=*) devices="${1#*=}"; shift ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || refuse "no command to run"
check_command "$1" "--help, --dry_run, --devices=N"
if [ -n "$devices" ] && ! [[ "$devices" =~ ^[1-9][0-9]*$ ]]; then
  refuse "--devices=$devices; allowed: a positive integer"
fi

python="${AGENTJAX_PYTHON:-}"
environment=()
if [ -z "$python" ] && [ -x "$root/.venv/bin/python" ]; then
  python="$root/.venv/bin/python"
elif [ -z "$python" ]; then
  python="python3"
fi
# The package is found from any folder, also by a Python that it is not installed in.
environment+=("PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}")
if [ -n "$devices" ]; then
  environment+=("JAX_PLATFORMS=cpu")
  environment+=("XLA_FLAGS=${XLA_FLAGS:-} --xla_force_host_platform_device_count=$devices")
fi
if $dry_run; then
  printf '%q ' env "${environment[@]}" "$python" "$@"
  echo
  exit 0
fi
exec env "${environment[@]}" "$python" "$@"
