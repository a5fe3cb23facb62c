#!/usr/bin/env bash
# Runs one training or evaluation command on this machine.
#
#   launch/local.sh [--dry_run] [--devices=N] COMMAND...
#   launch/local.sh -m agentjax.train --config=configs/quickstart.py --workdir=runs/a
#
# --devices=N forces N host devices on a CPU machine, to try a sharded config before a pod.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '2,7s/^# \{0,1\}//p' "$0"; }

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
[ $# -gt 0 ] || { usage >&2; exit 2; }
if [ -n "$devices" ] && ! [[ "$devices" =~ ^[1-9][0-9]*$ ]]; then
  echo "error: --devices=$devices; allowed: a positive integer" >&2
  exit 2
fi

command=("${AGENTJAX_PYTHON:-.venv/bin/python}" "$@")
environment=()
if [ -n "$devices" ]; then
  environment+=("JAX_PLATFORMS=cpu")
  environment+=("XLA_FLAGS=${XLA_FLAGS:-} --xla_force_host_platform_device_count=$devices")
fi
if $dry_run; then
  printf '%q ' env ${environment[@]+"${environment[@]}"} "${command[@]}"
  echo
  exit 0
fi
exec env ${environment[@]+"${environment[@]}"} "${command[@]}"
