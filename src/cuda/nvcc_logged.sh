#!/bin/sh
# nvcc_logged.sh LOG COMMAND...: what the command says goes to LOG (tests/cuda/gates.py reads it), and is shown if it fails.
log=$1
shift
"$@" >"$log" 2>&1 && exit 0
cat "$log" >&2
rm -f "$log"
exit 1
