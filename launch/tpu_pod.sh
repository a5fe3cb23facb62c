#!/usr/bin/env bash
# Starts the same command on every host of a Cloud TPU pod slice.
#
#   launch/tpu_pod.sh --tpu=NAME --zone=ZONE [--project=ID] [--directory=agentjax] [--setup]
#                     [--dry_run] COMMAND...
#   launch/tpu_pod.sh --tpu=pod-a --zone=us-east5-b -m agentjax.train --distributed \
#       --config=configs/quickstart.py --workdir=/mnt/shared/run
#
# --setup copies this folder to every host and installs it there with the [tpu] extra first.
# --dry_run prints the gcloud commands and runs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '2,10s/^# \{0,1\}//p' "$0"; }

tpu="" zone="" project="" directory="agentjax" setup=false dry_run=false
while [ $# -gt 0 ]; do
  case "$1" in
    --help) usage; exit 0 ;;
    --tpu=*) tpu="${1#*=}" ;;
    --zone=*) zone="${1#*=}" ;;
    --project=*) project="${1#*=}" ;;
    --directory=*) directory="${1#*=}" ;;
    --setup) setup=true ;;
    --dry_run) dry_run=true ;;
    *) break ;;
  esac
  shift
done
for name in tpu zone; do
  [ -n "${!name}" ] || { echo "error: --$name is missing" >&2; usage >&2; exit 2; }
done
$setup || [ $# -gt 0 ] || { echo "error: no command to run" >&2; usage >&2; exit 2; }

where=("--zone=$zone")
[ -z "$project" ] || where+=("--project=$project")

run() {
  if $dry_run; then
    printf '%q ' "$@"
    echo
  else
    "$@"
  fi
}

on_every_host() {
  run gcloud compute tpus tpu-vm ssh "$tpu" "${where[@]}" --worker=all "--command=$1"
}

if $setup; then
  archive="$(mktemp -d)/agentjax.tar.gz"
  run git archive --format=tar.gz "--output=$archive" HEAD
  run gcloud compute tpus tpu-vm scp "$archive" "$tpu:agentjax.tar.gz" "${where[@]}" --worker=all
  on_every_host "mkdir -p $(printf '%q' "$directory") && tar -xzf agentjax.tar.gz -C $(printf '%q' "$directory") \
&& cd $(printf '%q' "$directory") && make venv && .venv/bin/pip install --quiet --editable '.[tpu]'"
fi
if [ $# -gt 0 ]; then
  on_every_host "cd $(printf '%q' "$directory") && .venv/bin/python$(printf ' %q' "$@")"
fi
