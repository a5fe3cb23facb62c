# What both launch scripts share; read with `.`, after `root` is set.

# The comment at the top of the script that runs.
usage() { awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"; }

refuse() {
  printf 'error: %s\n\n' "$1" >&2
  usage >&2
  exit 2
}

# check_command FIRST_WORD KNOWN_OPTIONS: refuses a mistyped option before anything is started.
check_command() {
  case "$1" in
    -m | -c | *.py) ;;
    -*) refuse "unknown option $1; allowed: $2, then the command" ;;
    *) refuse "a command begins with -m MODULE, -c CODE or a file.py, got $1" ;;
  esac
}
