#!/usr/bin/env bash
# Starts the same command on every host of a Cloud TPU pod slice.
#
#   launch/tpu_pod.sh --tpu=NAME --zone=ZONE [--project=ID] [--directory=agentjax] [--setup]
#                     [--dry_run] COMMAND...
#   launch/tpu_pod.sh --tpu=pod-a --zone=us-east5-b -m agentjax.train --distributed \
#       --config=configs/quickstart.py --workdir=/mnt/shared/run
#
# COMMAND begins with -m MODULE, -c CODE or a file.py. It starts in the folder this script is
# called from, as that folder stands in the copy on the hosts. --setup first copies the working
# tree to every host, uncommitted and new files too, and installs it there with the [tpu] extra.
# Without --setup each host warns if its copy is not the tree here.
# --dry_run prints the commands and runs nothing.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
. "$root/launch/common.sh"

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
[ $# -eq 0 ] || check_command "$1" \
  "--help, --tpu=NAME, --zone=ZONE, --project=ID, --directory=FOLDER, --setup, --dry_run"
for name in tpu zone directory; do
  [ -n "${!name}" ] || refuse "--$name is missing"
done
$setup || [ $# -gt 0 ] || refuse "no command to run"

# The folder on the hosts that answers to the one this was called from.
case "$PWD/" in
  "$root"/*) folder="$directory${PWD#"$root"}" ;;
  *)
    folder="$directory"
    echo "note: $PWD is not inside $root; the command starts in $directory on the hosts" >&2
    ;;
esac

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

# The files a host needs: all that git tracks or would track, as they are now.
tree() {
  git -C "$root" ls-files -z --cached --others --exclude-standard --deduplicate |
    while IFS= read -r -d '' file; do
      if [ -f "$root/$file" ]; then printf '%s\0' "$file"; fi
    done
}

git -C "$root" rev-parse --quiet --verify HEAD >/dev/null ||
  refuse "$root is not a git checkout; the tree to copy is what git tracks there"
tree_hash="$(cd "$root" && tree | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16)"
there="$(printf '%q' "$directory")"

if $setup; then
  changed="$(git -C "$root" status --porcelain | wc -l)"
  [ "$changed" -eq 0 ] || echo "note: $changed uncommitted files are copied as they are" >&2
  archive="$(mktemp -d)/agentjax.tar.gz"
  if $dry_run; then
    printf 'tar -czf %q -C %q FILES\n' "$archive" "$root"
  else
    tree | tar -czf "$archive" -C "$root" --null --files-from=-
  fi
  run gcloud compute tpus tpu-vm scp "$archive" "$tpu:agentjax.tar.gz" "${where[@]}" --worker=all
  on_every_host "mkdir -p $there && tar -xzf agentjax.tar.gz -C $there && cd $there \
&& make venv && .venv/bin/pip install --quiet --editable '.[tpu]' && echo $tree_hash > .tree_hash"
fi
if [ $# -gt 0 ]; then
  on_every_host "home=\$PWD; cd $there && root=\$PWD && cd \"\$home\" && cd $(printf '%q' "$folder") || exit 2; \
[ \"\$(cat \"\$root/.tree_hash\" 2>/dev/null)\" = $tree_hash ] || \
echo 'warning: the code on this host is not the tree this was launched from; --setup copies it' >&2; \
python=\"\$root/.venv/bin/python\"; [ -x \"\$python\" ] || python=python3; \
PYTHONPATH=\"\$root\" \"\$python\"$(printf ' %q' "$@")"
fi
